"""The pool of table sync workers: which tables are due, which of them go together, and how many workers at once.

A worker has one slot, so the number of workers is the number of slots; one that could not be dropped counts until it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from headwater.config.pipeline import PipelineConfig
from headwater.contracts.stores import PipelineStore
from headwater.engine.copied_schemas import CopiedSchemas
from headwater.engine.retry_times import RetryTimes
from headwater.engine.run_guard import RunGuard
from headwater.engine.source import Source
from headwater.engine.table_states import TableStates
from headwater.engine.table_sync.groups import form_groups
from headwater.engine.table_sync.tables import SyncTable
from headwater.engine.table_sync.worker import TableSyncWorker
from headwater.engine.wake_up import WakeUp
from headwater.errors import HeadwaterError, SlotError, StoreUnavailable
from headwater.limits import naming_limits
from headwater.schema.table import TableId, TableName
from headwater.source.publication import PublishedTable
from headwater.source.session import Connection, connect
from headwater.source.slots import drop_slot, sync_slot_name
from headwater.states import INIT, Actor, Phase, TableState

log = logging.getLogger(__name__)

_DROP_AGAIN_SECONDS = 2.0
_WITHOUT_WORKER = frozenset({Phase.DATA_SYNC, Phase.FINISHED_COPY, Phase.SYNC_WAIT, Phase.CATCHUP})
"""A worker's phases: a table found in one of them without a worker lost it while the store was unreachable."""
_WRITING = frozenset(Phase) - {Phase.INIT, Phase.ERRORED}


MakeWorker = Callable[[Sequence[PublishedTable], str], TableSyncWorker]
"""Makes a worker for these tables, with a slot of this name."""


class TableSyncPool:
    """Used by one thread, together with the look at the catalog; after that thread has ended, by the supervising one."""

    def __init__(
        self,
        config: PipelineConfig,
        source: Source,
        store: PipelineStore,
        table_states: TableStates,
        guard: RunGuard,
        tables: Sequence[PublishedTable],
        make_worker: MakeWorker,
        on_fatal: Callable[[HeadwaterError], None],
    ) -> None:
        """`on_fatal` is given an error that ends the whole run, by the worker's thread."""
        self._config = config
        self._source = source
        self._store = store
        self._table_states = table_states
        self._schemas = CopiedSchemas(store, table_states)
        self._guard = guard
        self._make_worker = make_worker
        self._tables = {table.id: table for table in tables}
        self._on_fatal = on_fatal
        self._workers: dict[TableSyncWorker, threading.Thread] = {}
        self._not_before: dict[TableId, float] = {}
        self._alone: set[TableId] = set()
        """Tables that a group let go, because they kept the others back or might have."""
        self._left_slots: set[str] = set()
        self._leaving: set[TableId] = set()
        self._copy_again: set[TableId] = set()
        self._drop_again_at = 0.0
        self._attempts = guard.lock.attempts
        self._retry_times = RetryTimes(config)
        self.wake_up = WakeUp()
        table_states.listen(self.wake_up.notify)

    def tables(self) -> Mapping[TableId, PublishedTable]:
        return self._tables

    def refresh(self, table: PublishedTable) -> None:
        """The publication says something else of a table that stays: another name, another row filter."""
        self._tables[table.id] = table
        self._table_states.rename(table.id, table.name)

    def take_in(self, table: PublishedTable) -> bool:
        """A table joined: Init, then copied and followed. False while what it left behind earlier is still being cleared."""
        if table.id in self._leaving:
            return False
        self._table_states.load(table.id, table.name, None)
        self._tables[table.id] = table
        return True

    def let_go(self, table_id: TableId) -> None:
        """A table left: no batch is cut with changes of it from here on. What is kept of it goes once no worker uses it."""
        del self._tables[table_id]
        self._copy_again.discard(table_id)
        self._not_before.pop(table_id, None)
        self._table_states.forget(table_id)
        self._leaving.add(table_id)
        self._stop_worker(table_id)

    def copy_again(self, table_id: TableId) -> None:
        """Stop the table's worker, if it has one, and begin at Init. The others are not disturbed."""
        self._copy_again.add(table_id)
        self._stop_worker(table_id)

    def is_to_be_copied(self, table_id: TableId) -> bool:
        return table_id in self._copy_again

    @property
    def is_settled(self) -> bool:
        """Whether the states show all that was asked for."""
        return not self._copy_again

    def start_due(self) -> None:
        """Start workers for tables that wait for one; small tables share one."""
        self._collect()
        self._settle()
        self._drop_left_slots()
        free = self._config.max_table_sync_workers - len(self._workers) - len(self._left_slots)
        if free <= 0:
            return
        due = self._due()
        alone = self._alone | {table.id for table in due if self._table_states.has_failed(table.id)}
        for tables in form_groups(due, alone, self._source.locks_for_a_copy)[:free]:
            worker = self._make_worker(tables, self._slot_name(tables))
            thread = threading.Thread(
                target=self._run_worker, args=(worker,), name=f"headwater-sync-{tables[0].name}", daemon=True
            )
            with naming_limits(f"starting the copy of {tables[0].name}"):
                thread.start()
            # Only now: a worker that never ran would hold its tables for ever.
            self._workers[worker] = thread

    def join(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        for thread in self._workers.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def in_destination(self) -> bool:
        """Whether the destination is still at work for a worker, also for one that has ended."""
        return any(worker.in_destination for worker in self._workers)

    def _slot_name(self, tables: Sequence[PublishedTable]) -> str:
        table_id = tables[0].id if len(tables) == 1 else None
        return sync_slot_name(self._config.id, table_id, self._guard.lock.token, next(self._attempts))

    def _stop_worker(self, table_id: TableId) -> None:
        for worker in self._workers:
            worker.stop(table_id)

    def _held(self) -> set[TableId]:
        return {table for worker in self._workers for table in worker.held()}

    def _settle(self) -> None:
        """End what was asked for tables whose workers have let them go."""
        held = self._held() if self._copy_again or self._leaving else set()
        for table_id in list(self._copy_again):
            if table_id not in held:
                self._table_states.reset(table_id)
                self._not_before.pop(table_id, None)
                self._alone.discard(table_id)
                self._copy_again.discard(table_id)
        for table_id in list(self._leaving):
            # The destination records the table's watermark with a batch: purged before, it would come back.
            if table_id not in held and not self._table_states.is_being_written(table_id):
                self._store.delete_table_state(table_id)
                self._leaving.remove(table_id)

    def _run_worker(self, worker: TableSyncWorker) -> None:
        try:
            error = worker.run()
            # First: leaving waits for the destination, until the whole run stops.
            if error is not None:
                self._on_fatal(error)
        finally:
            worker.leave(self._guard)
            self.wake_up.notify()

    def _collect(self) -> None:
        for worker, thread in list(self._workers.items()):
            ended = not thread.is_alive()
            for table in worker.take_free():
                self._take_back(table)
            if ended:
                del self._workers[worker]
                if worker.left_slot:
                    self._left_slots.add(worker.slot_name)

    def _take_back(self, table: SyncTable) -> None:
        if table.id not in self._tables:
            return
        if self._tables[table.id] is table.listed:
            # Read again under the lock: the next attempt knows how large it is.
            self._tables[table.id] = table.published
        if table.wait_seconds is not None:
            self._not_before[table.id] = time.monotonic() + table.wait_seconds
        if table.goes_alone:
            self._alone.add(table.id)
        else:
            self._alone.discard(table.id)

    def _drop_left_slots(self) -> None:
        """A slot that is not read holds WAL for ever: it is dropped as soon as the server lets us."""
        if not self._left_slots or time.monotonic() < self._drop_again_at:
            return
        self._drop_again_at = time.monotonic() + _DROP_AGAIN_SECONDS
        try:
            with connect(self._source.settings) as connection:
                for name in list(self._left_slots):
                    self._drop_left_slot(connection, name)
        except HeadwaterError as error:
            log.warning("slots left by table sync could not be dropped yet: %s", error.message)

    def _drop_left_slot(self, connection: Connection, name: str) -> None:
        try:
            self._guard.require_lock()
            drop_slot(connection, name, wait_seconds=1.0)
            self._left_slots.remove(name)
        except SlotError as error:
            # Another session reads it: that is no reason to leave the others.
            log.warning("a slot left by table sync could not be dropped yet: %s", error.message)

    def _writers(self, held: set[TableId]) -> dict[TableName, set[TableId]]:
        """The tables whose changes or copies go, or went until now, to a destination table of this name."""
        writers: dict[TableName, set[TableId]] = {}
        states = self._table_states.all()
        for table_id in {*states, *self._leaving}:
            state = states.get(table_id)
            is_writing = table_id in held or self._table_states.is_being_written(table_id)
            schema = self._schemas.of(table_id)
            if schema is not None and (is_writing or (state is not None and state.phase in _WRITING)):
                writers.setdefault(schema.name, set()).add(table_id)
        return writers

    def _due(self) -> list[PublishedTable]:
        due, held = [], self._held()
        # Looked at only where a copy may begin: a table that waits for the operator costs nothing here.
        begins = any(id not in held and self._may_begin(id, state) for id, state in self._table_states.all().items())
        writers = self._writers(held) if begins else {}
        for table_id, state in self._table_states.all().items():
            if table_id in held or table_id not in self._tables or table_id in self._copy_again:
                continue
            # Tables that swap their names: what goes there under the old name comes to an end first.
            if writers.get(self._tables[table_id].name, set()) - {table_id}:
                continue
            if self._table_states.is_being_written(table_id):
                continue
            if time.monotonic() < self._not_before.get(table_id, 0.0):
                continue
            if state.phase in _WITHOUT_WORKER or self._is_tried_again(table_id, state):
                try:
                    self._table_states.move(table_id, INIT, Actor.PIPELINE, only_from=state)
                except StoreUnavailable as error:
                    log.info("table %s is tried again once the store is back: %s", table_id, error.message)
                    self._not_before[table_id] = time.monotonic() + _DROP_AGAIN_SECONDS
                    continue
                due.append(self._tables[table_id])
            elif state.phase is Phase.INIT:
                due.append(self._tables[table_id])
        return due

    def _may_begin(self, table_id: TableId, state: TableState) -> bool:
        return state.phase is Phase.INIT or state.phase in _WITHOUT_WORKER or self._is_tried_again(table_id, state)

    def _is_tried_again(self, table_id: TableId, state: TableState) -> bool:
        return state.phase is Phase.ERRORED and self._retry_times.is_due(table_id, state)
