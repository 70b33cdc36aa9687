"""How a table sync worker's changes become durable: for several tables in one call, with an outcome for each."""

from __future__ import annotations

from headwater.contracts.stores import PipelineStore, WorkerType
from headwater.engine.destination_calls import DestinationCalls
from headwater.engine.retry import raise_if_not_the_tables_own, waits
from headwater.engine.run_guard import RunGuard
from headwater.engine.table_sync.tables import SyncTable, SyncTables
from headwater.errors import HeadwaterError, Meaning, meaning
from headwater.events import EventBatch, SourceRead
from headwater.schema.table import TableId

_OF_TABLES = (Meaning.TABLE, Meaning.START_AGAIN)


class SyncWrite:
    """Used by the worker's thread."""

    def __init__(
        self, store: PipelineStore, calls: DestinationCalls, tables: SyncTables, guard: RunGuard, slot_name: str
    ) -> None:
        self._store = store
        self._calls = calls
        self._tables = tables
        self._guard = guard
        self._name = f"headwater-catchup-{slot_name}"

    def persist(self, batch: EventBatch, *, may_read_on: bool) -> dict[TableId, SourceRead]:
        """Write it and record it. What cannot be written takes its table out; what is out already is left out.

        Returns the tables that wait for what follows in the stream, with what was read for them: of those nothing was written.
        Done again while the destination or the store is unreachable: that is no reason to throw finished copies away.
        """

        def persist() -> dict[TableId, SourceRead]:
            reads = self._write(self._kept(batch), may_read_on)
            self._guard.require_lock()
            for table in self._kept(batch).tables.keys() - reads.keys():
                self._store.upsert_replication_progress(WorkerType(table), batch.end_lsn)
            return reads

        def pause(seconds: float) -> None:
            self._guard.pause(seconds)
            self._tables.end_stopped()

        return self._guard.retrying(f"writing changes of {self._tables.what}", persist, pause=pause, again=waits)

    def _kept(self, batch: EventBatch) -> EventBatch:
        return batch.without(batch.tables.keys() - {table.id for table in self._tables.working})

    def _write(self, batch: EventBatch, may_read_on: bool) -> dict[TableId, SourceRead]:
        """One call for all. If the destination cannot say which table failed, one for each: it bears the same changes twice."""
        try:
            return self._call(batch, may_read_on)
        except HeadwaterError as error:
            if meaning(error) not in _OF_TABLES:
                raise
            self._guard.raise_if_stopped()
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
        self._guard.require_lock()
        pending = self._calls.write_events(self._name, batch)
        for table in self._of(batch):
            table.pending = pending
        try:
            pending.wait(self._guard.stop)
        finally:
            for table_id, count in pending.missed.items():
                self._guard.progress.missed(table_id, count)
        raise_if_not_the_tables_own(batch, pending.table_errors)
        reads = dict(pending.reads) if may_read_on else {}
        for table in self._of(batch):
            if table.id in pending.table_errors and table.id not in reads:
                self._tables.fail(table, pending.table_errors[table.id])
        return reads

    def _of(self, batch: EventBatch) -> list[SyncTable]:
        return [table for table in self._tables.working if table.id in batch.tables]
