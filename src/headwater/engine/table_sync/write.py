"""How a table sync worker's changes become durable: for several tables in one call, with an outcome for each."""

from __future__ import annotations

from headwater.contracts.results import WriteEventsResult
from headwater.contracts.stores import WorkerType
from headwater.engine.destination_calls import call
from headwater.engine.retry import raise_if_not_the_tables_own, retrying, waits
from headwater.engine.run import Run
from headwater.engine.table_sync.tables import SyncTable, SyncTables
from headwater.errors import HeadwaterError, Meaning, meaning
from headwater.events import EventBatch, SourceRead
from headwater.schema.table import TableId

_OF_TABLES = (Meaning.TABLE, Meaning.START_AGAIN)


class SyncWrite:
    """Used by the worker's thread."""

    def __init__(self, run: Run, tables: SyncTables, slot_name: str) -> None:
        self._run = run
        self._tables = tables
        self._name = f"headwater-catchup-{slot_name}"

    def persist(self, batch: EventBatch, *, may_read_on: bool) -> dict[TableId, SourceRead]:
        """Write it and record it. What cannot be written takes its table out; what is out already is left out.

        Returns the tables that wait for what follows in the stream, with what was read for them: of those nothing was written.
        Done again while the destination or the store is away: that is no reason to throw finished copies away.
        """

        def persist() -> dict[TableId, SourceRead]:
            reads = self._write(self._kept(batch), may_read_on)
            self._run.require_lock()
            for table in self._kept(batch).tables.keys() - reads.keys():
                self._run.store.upsert_replication_progress(WorkerType(table), batch.end_lsn)
            return reads

        def pause(seconds: float) -> None:
            self._run.pause(seconds)
            self._tables.end_stopped()

        doing = f"writing changes of {self._tables.what}"
        return retrying(doing, persist, progress=self._run.progress, pause=pause, again=waits)

    def _kept(self, batch: EventBatch) -> EventBatch:
        return batch.without(batch.tables.keys() - {table.id for table in self._tables.working})

    def _write(self, batch: EventBatch, may_read_on: bool) -> dict[TableId, SourceRead]:
        """One call for all. If the destination cannot say whose its trouble is, one for each: it bears the same changes twice."""
        try:
            return self._call(batch, may_read_on)
        except HeadwaterError as error:
            if meaning(error) not in _OF_TABLES:
                raise
            self._run.raise_if_stopped()
            if len(batch.tables) == 1:
                self._fail(batch, error)
                return {}
            reads: dict[TableId, SourceRead] = {}
            for table_id in batch.tables:
                alone = batch.without(batch.tables.keys() - {table_id})
                try:
                    reads |= self._call(alone, may_read_on)
                except HeadwaterError as own:
                    if meaning(own) not in _OF_TABLES:
                        raise
                    self._fail(alone, own)
            return reads

    def _fail(self, batch: EventBatch, error: HeadwaterError) -> None:
        for table in self._of(batch):
            self._tables.fail(table, error)

    def _call(self, batch: EventBatch, may_read_on: bool) -> dict[TableId, SourceRead]:
        if not batch.tables:
            return {}
        self._run.require_lock()
        run, write = self._run, self._run.destination.write_events
        pending = call(self._name, WriteEventsResult(), lambda result: write(batch, result), run.deadline_seconds)
        for table in self._of(batch):
            table.pending = pending
        try:
            pending.wait(run.stop)
        finally:
            for table_id, count in pending.missed.items():
                run.progress.missed(table_id, count)
        raise_if_not_the_tables_own(batch, pending.table_errors)
        reads = dict(pending.reads) if may_read_on else {}
        for table in self._of(batch):
            if table.id in pending.table_errors and table.id not in reads:
                self._tables.fail(table, pending.table_errors[table.id])
        return reads

    def _of(self, batch: EventBatch) -> list[SyncTable]:
        return [table for table in self._tables.working if table.id in batch.tables]
