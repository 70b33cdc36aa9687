"""A table sync worker: copies one table, or a group of small ones, under lock and exported snapshot, follows its own slot, and
hands the tables over.

Publication, then lock, then slot with exported snapshot, then copy (invariant 1). The tables share lock, slot, snapshot and
connection; each has a state, a copy and an error of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headwater.config.pipeline import PipelineConfig
from headwater.contracts.stores import PipelineStore
from headwater.engine.copied_schemas import CopiedSchemas
from headwater.engine.destination_calls import DestinationCalls
from headwater.engine.follow.follower import Follower
from headwater.engine.follow.ownership import TableSyncOwnership
from headwater.engine.hand_off import Positions
from headwater.engine.run_guard import RunGuard
from headwater.engine.source import Source
from headwater.engine.table_states import TableStates
from headwater.engine.table_sync.catch_up import CatchUp
from headwater.engine.table_sync.copy import SyncCopy
from headwater.engine.table_sync.copy_cores import CopyCores
from headwater.engine.table_sync.copy_planner import CopyPlanner
from headwater.engine.table_sync.slot import CopyInterrupted, SyncSlot, make_sync_slot
from headwater.engine.table_sync.tables import SyncTable, SyncTables
from headwater.engine.table_sync.write import SyncWrite
from headwater.engine.wake_up import WakeUp
from headwater.errors import HeadwaterError, Meaning, Retry, meaning, said_by, where_raised
from headwater.limits import limit_reached
from headwater.schema.table import TableId
from headwater.source.catalog_look import CatalogLooks
from headwater.source.session import Connection, connect
from headwater.source.slots import drop_slot
from headwater.source.table_lock import TablesTaken, table_lock, taken_tables
from headwater.states import DATA_SYNC, Actor
from headwater.wire.pgoutput import PgOutputDecoder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_LOCK_ATTEMPTS = 3


class TableSyncWorker:
    """Runs in a thread of its own (`run`), once; the pool starts another for another attempt."""

    def __init__(
        self,
        config: PipelineConfig,
        source: Source,
        store: PipelineStore,
        calls: DestinationCalls,
        spark: SparkSession | None,
        new_decoder: Callable[[], PgOutputDecoder],
        table_states: TableStates,
        tables: SyncTables,
        cores: CopyCores,
        guard: RunGuard,
        slot_name: str,
    ) -> None:
        """`guard` is the worker's own part of the run's, and `tables` listen to it."""
        self._config = config
        self._source = source.interrupted_by(guard.stop)
        self._settings = self._source.named(slot_name)
        self._store = store
        self._calls = calls
        self._spark = spark
        self._new_decoder = new_decoder
        self._table_states = table_states
        self._tables = tables
        self._cores = cores
        self._guard = guard
        self._wake_up = WakeUp()
        self.slot_name = slot_name
        self.left_slot = False
        """Set when the slot could not be dropped: the pool drops it later, or it would hold WAL for ever."""

    def stop(self, table_id: TableId) -> None:
        """Ask for an end of one table, from any thread. Nothing is recorded; the others go on."""
        self._tables.stop(table_id)
        self._wake_up.notify()

    def held(self) -> frozenset[TableId]:
        """The tables that no other worker may touch now. From any thread."""
        return self._tables.held()

    @property
    def in_destination(self) -> bool:
        """Whether the destination is still at work for this worker, which may have ended. For the pool's thread."""
        return self._tables.in_destination

    def take_free(self) -> list[SyncTable]:
        """The tables that were let go since the last call. For the pool's thread."""
        return self._tables.take_free()

    def run(self) -> HeadwaterError | None:
        """Returns the error that ends the whole run, if there is one."""
        wake = self._wake_up.notify
        self._table_states.listen(wake)
        try:
            return self._attempt()
        finally:
            self._table_states.unlisten(wake)

    def _attempt(self) -> HeadwaterError | None:
        try:
            try:
                self._sync()
            except CopyInterrupted as error:
                self._failed(error, error.suspects)
            except HeadwaterError as error:
                self._failed(error)
            except Exception as error:
                self._failed(_explained(self._tables.what, error))
        except HeadwaterError as error:
            # Never recorded: the copies start again with the next run, or the whole run ends.
            self.left_slot = True
            return error if meaning(error) is not Meaning.STOPPING else None
        return None

    def _sync(self) -> None:
        with connect(self._settings) as admin:
            self._guard.require_lock()
            self._tables.each(self._end_old_copy)
            self._table_states.move_all({table.id: DATA_SYNC for table in self._tables.working}, Actor.TABLE_SYNC)
            slot = self._copy(admin)
        if slot is not None:
            try:
                self._catch_up(slot)
            finally:
                slot.close()
        with connect(self._settings) as admin:
            self._give_up_slot(admin)

    # Copying

    def _end_old_copy(self, table: SyncTable) -> None:
        old = CopiedSchemas(self._store, self._table_states).of(table.id)
        if old is not None:
            self._guard.require_lock()
            table.pending = self._calls.drop_table_for_copy(old)
            table.pending.wait(table.stop)
        self._store.prepare_table_state_for_copy(table.id)

    def _copy(self, admin: Connection) -> SyncSlot | None:
        """The slot to go on with, or None if no table needs it any more."""
        for attempt in range(_LOCK_ATTEMPTS):
            self._leave_taken(admin)
            if not self._tables.working:
                return None
            try:
                return self._copy_under_lock(admin)
            except TablesTaken:
                if attempt == _LOCK_ATTEMPTS - 1:
                    raise
        return None

    def _copy_under_lock(self, admin: Connection) -> SyncSlot:
        tables, ids = self._tables, [table.id for table in self._tables.working]
        # Several tables are locked at once or not at all: see lock_tables.
        most = self._source.locks_for_a_copy
        with table_lock(self._settings, ids, wait=not tables.is_group, most_relations=most) as lock:
            # After a long wait for the lock, the pool may be gone: a slot made now would not be dropped.
            self._guard.raise_if_stopped()
            self._take_fingerprints(admin)
            slot = make_sync_slot(self._source, self._guard, self._wake_up, self.slot_name, tables.what, admin, lock)
            try:
                planner = CopyPlanner(
                    self._config,
                    self._source,
                    self._store,
                    self._table_states,
                    self._guard.progress,
                    self._spark,
                    lock,
                    slot,
                    admin,
                    tables.what,
                )
                SyncCopy(
                    tables,
                    planner,
                    self._calls,
                    self._spark,
                    self._table_states,
                    lock,
                    slot,
                    self._cores,
                    self._guard,
                    self._wake_up,
                ).copy()
            except BaseException:
                slot.close()
                raise
            return slot

    def _take_fingerprints(self, admin: Connection) -> None:
        """Under the lock and before the slot: whatever changes from here on is found by a look, or shown by the stream."""
        tables = {table.id: table for table in self._tables.working}
        look = CatalogLooks(self._source.publication, list(tables)).look(admin)
        found = {id: replace(look.tables[id], copied_at=look.since.value) for id in tables if id in look.tables}
        for id, fingerprint in found.items():
            tables[id].fingerprint = fingerprint
        self._table_states.fingerprinted(found)

    def _leave_taken(self, admin: Connection) -> None:
        """Of a group: tables that another session has locked wait for it alone, and not the others with them."""
        if not self._tables.is_group:
            return
        taken = taken_tables(admin, [table.id for table in self._tables.working])
        for table in self._tables.working:
            if table.id in taken:
                self._tables.send_back(table, alone=True)

    # Following

    def _catch_up(self, slot: SyncSlot) -> None:
        if not self._tables.working:
            return
        for table in self._tables.working:
            fingerprint = table.fingerprint
            if fingerprint is not None and fingerprint.needs_fresh_stream(self._source.server.version_number):
                self._table_states.needs_stream_from(table.id, slot.start)
        schemas = [table.schema for table in self._tables.working if table.schema is not None]
        ownership = TableSyncOwnership(schemas, slot.start)
        catching_up = CatchUp(
            self._config.batch,
            self._tables,
            slot,
            Follower(slot, ownership, self._new_decoder, Positions.at(slot.start)),
            ownership,
            SyncWrite(self._store, self._calls, self._tables, self._guard, slot.name),
            self._table_states,
            self._guard,
            self._wake_up,
        )
        try:
            catching_up.run()
        finally:
            catching_up.close()

    # The end

    def _failed(self, error: HeadwaterError, suspects: frozenset[TableId] = frozenset()) -> None:
        if meaning(error) in (Meaning.FATAL, Meaning.STOPPING):
            raise error
        self._guard.raise_if_stopped()
        self._tables.fail_all(error, suspects)
        try:
            with connect(self._settings) as admin:
                self._give_up_slot(admin)
        except HeadwaterError as again:
            self.left_slot = True
            if meaning(again) is Meaning.FATAL:
                raise

    def _give_up_slot(self, admin: Connection) -> None:
        self._guard.require_lock()
        try:
            drop_slot(admin, self.slot_name)
        except HeadwaterError as error:
            self.left_slot = True
            log.warning(
                "replication slot %s could not be dropped, trying again later: %s", self.slot_name, error.message
            )

    def leave(self, whole_run: RunGuard) -> None:
        """At the end of the worker's thread. Another attempt at a table comes only after the destination has left it."""
        for table in self._tables.working:
            self._tables.end(table)
        self._tables.await_destination(whole_run.stop)


def _explained(what: str, error: Exception) -> HeadwaterError:
    if (limit := limit_reached(error, f"copying {what}")) is not None:
        return limit
    log.error("%s: the table sync worker failed: %s\n%s", what, said_by(error), where_raised(error))
    return HeadwaterError(
        f"table sync of {what} failed",
        detail=said_by(error),
        hint="This is a defect of Headwater; report it with the log. The table is tried again.",
        retry=Retry.TIMED,
    )
