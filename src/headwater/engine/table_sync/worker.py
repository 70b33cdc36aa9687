"""A table sync worker: copies one table, or a group of small ones, under lock and exported snapshot, follows its own slot, and
hands the tables over.

Publication, then lock, then slot with exported snapshot, then copy (invariant 1). The tables share lock, slot, snapshot and
connection; each has a state, a copy and an error of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from headwater.contracts.results import DropTableForCopyResult
from headwater.engine.destination_calls import call
from headwater.engine.run import Run
from headwater.engine.table_sync.catch_up import SyncFollow
from headwater.engine.table_sync.copy import SyncCopy
from headwater.engine.table_sync.copy_cores import CopyCores
from headwater.engine.table_sync.slot import GaveWay, SyncSlot, make_sync_slot
from headwater.engine.table_sync.tables import SyncTable, SyncTables
from headwater.engine.wake_up import WakeUp
from headwater.errors import HeadwaterError, Meaning, Retry, meaning, said_by, where_raised
from headwater.limits import limit_reached
from headwater.schema.table import TableId
from headwater.source.catalog_look import CatalogLooks
from headwater.source.publication import PublishedTable
from headwater.source.session import Connection, connect
from headwater.source.slots import drop_slot
from headwater.source.table_lock import TablesTaken, table_lock, taken_tables
from headwater.states import DATA_SYNC, Actor

log = logging.getLogger(__name__)

_LOCK_ATTEMPTS = 3


class TableSyncWorker:
    """Runs in a thread of its own (`run`), once; the pool starts another for another attempt."""

    def __init__(
        self,
        run: Run,
        tables: Sequence[PublishedTable],
        slot_name: str,
        cores: CopyCores,
        on_fatal: Callable[[HeadwaterError], None],
    ) -> None:
        stop = run.stop.part()
        self._run_ = replace(run, stop=stop, settings=replace(run.settings, interrupt=stop))
        self._whole_run = run
        self._tables = SyncTables(self._run_, tables)
        self._cores = cores
        self._on_fatal = on_fatal
        self._wake_up = WakeUp()
        self.slot_name = slot_name
        self._settings = replace(self._run_.settings, application_name=slot_name)
        self.left_slot = False
        """Set when the slot could not be dropped: somebody has to, or it holds WAL for ever."""

    def stop(self, table_id: TableId) -> None:
        """Ask for an end of one table, from any thread. Nothing is recorded; the others go on."""
        self._tables.stop(table_id)
        self._wake_up.notify()

    def held(self) -> frozenset[TableId]:
        """The tables that nobody else may touch now. From any thread."""
        return self._tables.held()

    @property
    def in_destination(self) -> bool:
        """Whether the destination is still at work for this worker, which may have ended. For the pool's thread."""
        return self._tables.in_destination

    def take_free(self) -> list[SyncTable]:
        """The tables that were let go since the last call. For the pool's thread."""
        return self._tables.take_free()

    def run(self) -> None:
        ring = self._wake_up.notify
        self._run_.table_states.listen(ring)
        try:
            self._attempt()
        finally:
            self._run_.table_states.unlisten(ring)
            # Another attempt, or the end of a table, comes only after this one has left the destination.
            for table in self._tables.working:
                self._tables.end(table)
            self._tables.await_destination(self._whole_run.stop)

    def _attempt(self) -> None:
        try:
            try:
                self._sync()
            except GaveWay as error:
                self._failed(error, error.suspects)
            except HeadwaterError as error:
                self._failed(error)
            except Exception as error:
                if (limit := limit_reached(error, f"copying {self._tables.what}")) is not None:
                    self._failed(limit)
                    return
                told = said_by(error), where_raised(error)
                log.error("%s: the table sync worker failed: %s\n%s", self._tables.what, *told)
                self._failed(_defect(self._tables.what, error))
        except HeadwaterError as error:
            # Never recorded: the copies start again with the next run, or the whole run ends.
            self.left_slot = True
            if meaning(error) is not Meaning.STOPPING:
                self._on_fatal(error)

    def _sync(self) -> None:
        run = self._run_
        with connect(self._settings) as admin:
            run.require_lock()
            self._tables.each(self._end_old_copy)
            run.table_states.move_all({table.id: DATA_SYNC for table in self._tables.working}, Actor.TABLE_SYNC)
            slot = self._copy(admin)
        if slot is not None:
            try:
                self._follow(slot)
            finally:
                slot.connection.close()
        with connect(self._settings) as admin:
            self._give_up_slot(admin)

    def _end_old_copy(self, table: SyncTable) -> None:
        run = self._run_
        old = run.stored_schema(table.id)
        if old is not None:
            run.require_lock()
            drop = run.destination.drop_table_for_copy
            table.pending = call(
                "headwater-drop", DropTableForCopyResult(), lambda result: drop(old, result), run.deadline_seconds
            )
            table.pending.wait(table.stop)
        run.store.prepare_table_state_for_copy(table.id)

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
        most = self._run_.locks_for_a_copy
        with table_lock(self._settings, ids, wait=not tables.is_group, most_relations=most) as lock:
            # Who waited long for the lock may find that nobody is left to drop a slot made now.
            self._run_.raise_if_stopped()
            self._take_fingerprints(admin)
            slot = make_sync_slot(self._run_, self._settings, self.slot_name, tables.what, admin, lock)
            try:
                SyncCopy(self._run_, tables, lock, slot, admin, self._cores, self._wake_up).copy()
            except BaseException:
                slot.connection.close()
                raise
            return slot

    def _take_fingerprints(self, admin: Connection) -> None:
        """Under the lock and before the slot: whatever changes from here on is found by a look, or told by the stream."""
        tables = {table.id: table for table in self._tables.working}
        look = CatalogLooks(self._run_.config.publication_name, list(tables)).look(admin)
        found = {id: replace(look.tables[id], copied_at=look.since.value) for id in tables if id in look.tables}
        for id, fingerprint in found.items():
            tables[id].fingerprint = fingerprint
        self._run_.table_states.fingerprinted(found)

    def _leave_taken(self, admin: Connection) -> None:
        """Of a group: those that another session has for itself wait for it alone, and not the others with them."""
        if not self._tables.is_group:
            return
        taken = taken_tables(admin, [table.id for table in self._tables.working])
        for table in self._tables.working:
            if table.id in taken:
                self._tables.send_back(table, alone=True)

    def _follow(self, slot: SyncSlot) -> None:
        if not self._tables.working:
            return
        following = SyncFollow(self._run_, self._tables, slot, self._settings, self._wake_up)
        try:
            following.follow()
        finally:
            following.close()

    def _failed(self, error: HeadwaterError, suspects: frozenset[TableId] = frozenset()) -> None:
        if meaning(error) in (Meaning.FATAL, Meaning.STOPPING):
            raise error
        self._run_.raise_if_stopped()
        self._tables.fail_all(error, suspects)
        try:
            with connect(self._settings) as admin:
                self._give_up_slot(admin)
        except HeadwaterError as trouble:
            self.left_slot = True
            if meaning(trouble) is Meaning.FATAL:
                raise

    def _give_up_slot(self, admin: Connection) -> None:
        self._run_.require_lock()
        try:
            drop_slot(admin, self.slot_name)
        except HeadwaterError as error:
            self.left_slot = True
            log.warning("slot %s could not be dropped, trying again later: %s", self.slot_name, error.message)


def _defect(what: str, error: Exception) -> HeadwaterError:
    return HeadwaterError(
        f"table sync of {what} failed",
        detail=said_by(error),
        hint="This is a defect of Headwater; report it with the log. The table is tried again.",
        retry=Retry.TIMED,
    )
