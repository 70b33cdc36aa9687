"""The tables of one table sync worker: each with a stop, a state and an error of its own.

A table is held until the destination has left it; only then may another worker take it, or its state be removed. What goes
wrong with one is recorded for that one, and the others go on (invariant 15).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from headwater.config.pipeline import PipelineConfig
from headwater.contracts.results import PendingResult
from headwater.engine.retry import waits
from headwater.engine.run_guard import RunGuard
from headwater.engine.stop import Stop
from headwater.engine.table_states import TableStates
from headwater.engine.table_sync.table_copy import TableCopy
from headwater.errors import HeadwaterError, Meaning, ShutdownRequested, StartAgain, meaning
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.source.fingerprint import Fingerprint
from headwater.source.publication import PublishedTable
from headwater.states import INIT, Actor, Phase, TableState

log = logging.getLogger(__name__)

_WAIT_SECONDS = 1.0


class SyncTable:
    """One table of a worker. Used by the worker's thread; `stop` may be set by any."""

    def __init__(self, published: PublishedTable, stop: Stop) -> None:
        self.listed = published
        """As the pool knew it."""
        self.published = published
        """The same, and as the publication has it under the lock once that is held."""
        self.stop = stop
        self.pending: PendingResult | None = None
        """The destination's last call for this table alone."""
        self.copy: TableCopy | None = None
        self.schema: ReplicatedTableSchema | None = None
        self.fingerprint: Fingerprint | None = None
        self.wait_seconds: float | None = None
        """Set when the attempt failed for a reason that may pass: how long to wait before the next."""
        self.goes_alone = False
        """Whether the next attempt should not be a group's."""

    @property
    def id(self) -> TableId:
        return self.published.id

    @property
    def is_busy(self) -> bool:
        return self.pending is not None and not self.pending.done


class SyncTables:
    """Those on their way to the hand-off (`working`), and those that ended and are not free yet."""

    def __init__(
        self,
        config: PipelineConfig,
        tables: Sequence[PublishedTable],
        table_states: TableStates,
        guard: RunGuard,
    ) -> None:
        self._config = config
        self._table_states = table_states
        self._guard = guard
        # A stop of its own for each: a table that leaves, or is to be copied again, is no reason for the others to stop.
        self._lock = threading.Lock()
        self._working = [SyncTable(table, guard.stop.part()) for table in tables]
        self._ending: list[SyncTable] = []
        self._free: list[SyncTable] = []
        self.is_group = len(tables) > 1
        self.what = f"{len(tables)} small tables" if self.is_group else f"table {tables[0].name}"

    # For the pool's thread.

    def stop(self, table_id: TableId) -> None:
        """Ask one table to end. The last one's stop is the worker's."""
        with self._lock:
            for table in self._working:
                if table.id == table_id:
                    table.stop.set()
            if self._working and all(table.stop.is_set() for table in self._working):
                self._guard.stop.set()

    def held(self) -> frozenset[TableId]:
        with self._lock:
            return frozenset(table.id for table in (*self._working, *self._ending))

    @property
    def in_destination(self) -> bool:
        """Whether the destination is still at work on a table, also one that the worker no longer waits for."""
        with self._lock:
            return any(table.is_busy for table in (*self._working, *self._ending, *self._free))

    def take_free(self) -> list[SyncTable]:
        """Those that became free since the last time."""
        with self._lock:
            self._free_the_idle()
            free, self._free = self._free, []
            return free

    # For the worker's thread.

    @property
    def working(self) -> list[SyncTable]:
        with self._lock:
            return list(self._working)

    def end(self, table: SyncTable) -> None:
        """The table needs nothing more: handed over, failed, or stopped. What the destination still does for it is cancelled."""
        if table.is_busy and table.copy is not None:
            table.copy.cancel()
        with self._lock:
            if table in self._working:
                self._working.remove(table)
                self._ending.append(table)

    def end_stopped(self) -> None:
        for table in self.working:
            if table.stop.is_set() or self._table_states.get(table.id) is None:
                self.end(table)

    def each(self, work: Callable[[SyncTable], object]) -> None:
        """Do it for every table that still works; one that fails is out."""
        for table in self.working:
            self._guard.raise_if_stopped()
            if table.stop.is_set():
                self.end(table)
                continue
            try:
                work(table)
            except HeadwaterError as error:
                self.fail(table, error)

    def move(self, tables: Iterable[SyncTable], state: TableState) -> None:
        """One record for all. Tried again while the store is unreachable: that is no reason to throw finished copies away."""
        states = {table.id: state for table in tables}

        def move() -> None:
            self._guard.require_lock()
            self._table_states.move_all(states, Actor.TABLE_SYNC)

        self._guard.retrying(f"recording {state} of {self.what}", move, again=waits)

    def fail(self, table: SyncTable, error: HeadwaterError) -> None:
        """Back to Init for what may pass by itself, else Errored with the policy that the error asks for."""
        if meaning(error) in (Meaning.FATAL, Meaning.STOPPING):
            raise error  # the whole run's
        self._guard.raise_if_stopped()
        if not table.stop.is_set():
            self._say(str(table.published.name), error)
            self._record_for_certain(table, error)
        self.end(table)

    def fail_all(self, error: HeadwaterError, suspects: Collection[TableId] = ()) -> None:
        """What the tables share failed. Of a group it is not known which table was the cause: each is tried again alone.

        Unless infrastructure was unreachable, which is no table's error, or the suspects are known.
        """
        if not self.is_group:
            for table in self.working:
                self.fail(table, error)
            return
        self._say(self.what, error)
        is_known = meaning(error) in (Meaning.WAIT, Meaning.START_AGAIN)
        for table in self.working:
            self.send_back(table, alone=table.id in suspects or not is_known)

    def send_back(self, table: SyncTable, *, alone: bool) -> None:
        """Back to Init without an error: another attempt comes soon."""
        table.goes_alone = alone
        if not table.stop.is_set():
            self._record_for_certain(table, StartAgain("its copy starts again", hint="Nothing is to be done."))
        self.end(table)

    def await_destination(self, stop: Stop) -> None:
        """Until the destination has left them. Not at a stop of the whole run: no other worker comes after this one."""
        with self._lock:
            pending = [table.pending for table in self._ending]
        for one in pending:
            if one is not None:
                with suppress(HeadwaterError):
                    one.wait(stop)
        with self._lock:
            self._free += self._ending
            self._ending = []

    def _say(self, what: str, error: HeadwaterError) -> None:
        log.warning("%s: %s", what, error)
        self._guard.progress.error(f"{what}: {error}")

    def _free_the_idle(self) -> None:
        self._free += [table for table in self._ending if not table.is_busy]
        self._ending = [table for table in self._ending if table.is_busy]

    def _record_for_certain(self, table: SyncTable, error: HeadwaterError) -> None:
        """Until it is recorded or the table stops: left in Catchup without a worker, it would hold up all others for ever."""
        with suppress(ShutdownRequested):
            self._guard.retrying(
                f"recording the error of table {table.published.name}",
                lambda: self._record(table, error),
                pause=lambda seconds: _pause(table.stop, seconds),
                again=lambda error: meaning(error) not in (Meaning.FATAL, Meaning.STOPPING),
            )

    def _record(self, table: SyncTable, error: HeadwaterError) -> None:
        table_states = self._table_states
        state = table_states.get(table.id)
        if state is None:
            return
        self._guard.lock.require(table.stop)
        if meaning(error) in (Meaning.WAIT, Meaning.START_AGAIN):
            table.wait_seconds = _WAIT_SECONDS
            if state.phase is not Phase.INIT:
                table_states.move(table.id, INIT, Actor.TABLE_SYNC)
            return
        table_states.fail(table.id, error.for_table(table.id), self._config, Actor.TABLE_SYNC)


def _pause(stop: Stop, seconds: float) -> None:
    if stop.wait(seconds):
        raise ShutdownRequested("the table is stopping", hint="Nothing is to be done.")
