"""The copies of a worker's tables, under one lock and at one exported snapshot (invariant 1).

Small tables of a group are read in one Spark job first; then each is written by a call of its own, some at once, with an
outcome of its own. The lock is looked at until the last copy is durable: one that was lost may have let a rewrite through.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from headwater.contracts.results import Result
from headwater.engine.destination_calls import DestinationCalls, call
from headwater.engine.retry import waits
from headwater.engine.run_guard import RunGuard
from headwater.engine.table_states import TableStates
from headwater.engine.table_sync.copy_cores import CopyCores, CopyShare
from headwater.engine.table_sync.copy_planner import CopyPlanner
from headwater.engine.table_sync.groups import HELD_BYTES
from headwater.engine.table_sync.slot import CopyInterrupted, SyncSlot
from headwater.engine.table_sync.table_copy import cancel_tagged, tagged
from headwater.engine.table_sync.tables import SyncTable, SyncTables
from headwater.engine.wake_up import WakeUp
from headwater.errors import HeadwaterError, Meaning, meaning
from headwater.schema.table import TableId
from headwater.source.table_lock import TableLock, taken_tables, waits_for_each_other
from headwater.spark.errors import translate
from headwater.spark.small_tables import NO_ROWS, HeldRows, ReadTable, read_in_one_job
from headwater.states import FINISHED_COPY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_CHECK_SECONDS = 1.0


class _GroupRead(Result):
    what = "the read of a group"


class SyncCopy:
    """Used by the worker's thread, once."""

    def __init__(
        self,
        tables: SyncTables,
        planner: CopyPlanner,
        calls: DestinationCalls,
        spark: SparkSession | None,
        table_states: TableStates,
        lock: TableLock,
        slot: SyncSlot,
        cores: CopyCores,
        guard: RunGuard,
        wake_up: WakeUp,
    ) -> None:
        self._tables = tables
        self._planner = planner
        self._calls = calls
        self._spark = spark
        self._table_states = table_states
        self._lock = lock
        self._slot = slot
        self._cores = cores
        self._guard = guard
        self._wake_up = wake_up
        self._checked = time.monotonic()

    def copy(self) -> None:
        """Every table that still works in the end is durable in the destination, and FinishedCopy."""
        if self._tables.is_group:
            self._planner.plan(self._tables, CopyShare(self._cores.beside_changes))
            self._read_together()
            self._write()
            return
        with self._cores.share(alone=len(self._table_states.all()) == 1) as share:
            self._planner.plan(self._tables, share)
            self._write()

    # The rows of small tables

    def _read_together(self) -> None:
        """Fill in the rows of all small tables by one job. A table that it could not read is read by itself, or fails."""
        spark = self._spark
        if spark is None:
            return  # read by the driver, a batch at a time, when the destination asks
        copies = {table: table.copy for table in self._tables.working if table.copy is not None}
        for copy in copies.values():
            if copy.plan.estimated_bytes == 0:
                # No blocks now, under the lock, so none at the snapshot.
                copy.held = NO_ROWS
        small = [copy.as_small() for copy in copies.values() if copy.held is None]
        tag = f"headwater-copy-{self._slot.name}"
        outcomes: dict[TableId, ReadTable] = {}
        at_once = self._cores.beside_changes

        def read(result: _GroupRead) -> None:
            outcomes.update(read_in_one_job(spark, small, at_once, HELD_BYTES))
            result.done()

        pending = call(
            f"headwater-read-{self._slot.name}",
            _GroupRead(),
            lambda result: tagged(spark, tag, lambda: _translated(lambda: read(result))),
        )
        try:
            pending.on_done(self._wake_up.notify)
            self._await(lambda: pending.done)
            pending.raise_if_failed()
        except HeadwaterError as error:
            cancel_tagged(spark, tag)
            self._guard.raise_if_stopped()
            if meaning(error) is not Meaning.TABLE:
                raise
            log.warning("%s: each is read by itself, since reading them together failed: %s", self._tables.what, error)
        for table, copy in copies.items():
            outcome = outcomes.get(table.id)
            if isinstance(outcome, HeldRows):
                copy.held = outcome
            elif outcome is not None:
                self._tables.fail(table, outcome)

    # Writing

    def _write(self) -> None:
        waiting, writing = deque(self._tables.working), list[SyncTable]()
        while waiting or writing:
            while waiting and len(writing) < self._cores.connections:
                writing.append(self._begin(waiting.popleft()))
            ended = self._await_any(writing)
            writing = [table for table in writing if table not in ended]
            if not self._finish(ended):
                # The destination or the source is unreachable. What is not begun has nothing to lose by another attempt.
                while waiting:
                    self._tables.send_back(waiting.popleft(), alone=False)

    def _await_any(self, writing: list[SyncTable]) -> list[SyncTable]:
        def ended() -> list[SyncTable]:
            return [table for table in writing if not table.is_busy or table.stop.is_set()]

        self._await(lambda: bool(ended()))
        return ended()

    def _begin(self, table: SyncTable) -> SyncTable:
        copy, schema = table.copy, table.schema
        assert copy is not None
        assert schema is not None
        self._guard.require_lock()
        state = self._table_states.get(table.id)
        rows = copy.rows(self._slot.start, take_over=state is not None and state.take_over)
        thread = f"headwater-copy-{table.published.name}"
        table.pending = self._calls.write_table_rows(thread, schema, rows, copy.in_job_group)
        table.pending.on_done(self._wake_up.notify)
        return table

    def _finish(self, ended: list[SyncTable]) -> bool:
        """Take over what the destination made of these copies. False if it is unreachable."""
        durable, there = list[SyncTable](), True
        for table in ended:
            assert table.pending is not None
            if table.stop.is_set():
                self._tables.end(table)
                continue
            try:
                table.pending.raise_if_failed()
                durable.append(table)
            except HeadwaterError as error:
                there = there and not waits(error)
                self._tables.fail(table, error)
        if durable:
            self._lock.check()
            for table in durable:
                assert table.copy is not None
                table.copy.finished()
            self._tables.move(durable, FINISHED_COPY)
        return there

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait; meanwhile look at the stop, at the lock, and at sessions that wait for it."""
        while not condition():
            self._wake_up.wait(_LOOK_SECONDS)
            self._guard.raise_if_stopped()
            for table in self._tables.working:
                if table.copy is not None and table.is_busy:
                    table.copy.report()
            if time.monotonic() - self._checked > _CHECK_SECONDS:
                self._lock.check()
                if waits_for_each_other(self._lock.connection, self._slot.name, self._lock.backend_pid):
                    raise CopyInterrupted(self._tables.what, taken_tables(self._lock.connection, self._lock.table_ids))
                self._checked = time.monotonic()


def _translated(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        raise translate(error) from error
