"""How a table sync worker's changes become durable: for several tables in one call, with an outcome for each."""

from __future__ import annotations

import logging

from headwater.contracts.results import WriteEventsResult
from headwater.contracts.stores import WorkerType
from headwater.engine.calls import call
from headwater.engine.retry import WORLD, Backoff, raise_if_not_the_tables_own
from headwater.engine.run import Run
from headwater.engine.sync_tables import SyncTable, SyncTables
from headwater.errors import HeadwaterError
from headwater.events import EventBatch

log = logging.getLogger(__name__)


class SyncWrite:
    """Used by the worker's thread."""

    def __init__(self, run: Run, tables: SyncTables, slot_name: str) -> None:
        self._run = run
        self._tables = tables
        self._name = f"headwater-catchup-{slot_name}"

    def persist(self, batch: EventBatch) -> None:
        """Write it and record it. What cannot be written takes its table out; what is out already is left out.

        Done again while the destination or the store is away: that is no reason to throw finished copies away.
        """
        backoff = Backoff(0.5)
        while True:
            try:
                self._write(self._kept(batch))
                for table in self._kept(batch).tables:
                    self._run.store.upsert_replication_progress(WorkerType(table), batch.end_lsn)
                return
            except WORLD as error:
                seconds = backoff.next_seconds()
                log.warning("%s: trying again in %.1f s: %s", self._tables.what, seconds, error)
                self._run.pause(seconds)
                self._tables.end_stopped()

    def _kept(self, batch: EventBatch) -> EventBatch:
        return batch.without(batch.tables.keys() - {table.id for table in self._tables.working})

    def _write(self, batch: EventBatch) -> None:
        """One call for all. If the destination cannot say whose its trouble is, one for each: it bears the same changes twice."""
        try:
            self._call(batch)
        except WORLD:
            raise
        except HeadwaterError as error:
            self._run.raise_if_stopped()
            if len(batch.tables) == 1:
                self._fail(batch, error)
                return
            for table_id in batch.tables:
                alone = batch.without(batch.tables.keys() - {table_id})
                try:
                    self._call(alone)
                except WORLD:
                    raise
                except HeadwaterError as own:
                    self._fail(alone, own)

    def _fail(self, batch: EventBatch, error: HeadwaterError) -> None:
        for table in self._of(batch):
            self._tables.fail(table, error)

    def _call(self, batch: EventBatch) -> None:
        if not batch.tables:
            return
        run, write = self._run, self._run.destination.write_events
        pending = call(self._name, WriteEventsResult(), lambda result: write(batch, result), run.deadline_seconds)
        for table in self._of(batch):
            table.pending = pending
        pending.wait(run.stop)
        raise_if_not_the_tables_own(batch, pending.table_errors)
        for table in self._of(batch):
            if table.id in pending.table_errors:
                self._tables.fail(table, pending.table_errors[table.id])

    def _of(self, batch: EventBatch) -> list[SyncTable]:
        return [table for table in self._tables.working if table.id in batch.tables]
