"""The hand-off as a pure model: a source, an apply worker, table sync workers, a store, a destination, crashes.

One step of one worker at a time, in any order. States, transitions, what a crash leaves and what the apply worker owns are
the code's own (`headwater.states`, `engine.ownership`, `lsn`); what the workers do around them is written here as the engine
does it, each questionable point as a method of `Rules`, so that a test can break it on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from headwater.engine.follow.ownership import ApplyOwnership
from headwater.engine.run import Run
from headwater.errors import DestinationError
from headwater.lsn import ZERO, CommitLsn, EndLsn
from headwater.schema.table import TableId
from headwater.states import (
    AFTER_CRASH,
    DATA_SYNC,
    FINISHED_COPY,
    INIT,
    READY,
    SYNC_WAIT,
    Actor,
    Phase,
    TableState,
    catchup,
    check_transition,
    errored,
    sync_done,
)

TABLES = (TableId(1), TableId(2), TableId(3))
Change = tuple[int, int]
"""The sequence key: commit LSN and ordinal."""


def some_tables(n: int) -> set[TableId]:
    """One of them, and perhaps others."""
    return {TABLES[n % 3]} | {table for i, table in enumerate(TABLES) if n // 3 >> i & 1}


class Violation(Exception):
    """A change was lost, doubled or out of order, or the workers stand still for ever."""


@dataclass(frozen=True)
class Transaction:
    commit: CommitLsn
    end: EndLsn
    counts: dict[TableId, int]

    def changes(self, table: TableId) -> list[Change]:
        return [(self.commit.value, ordinal) for ordinal in range(self.counts.get(table, 0))]


@dataclass
class Copy:
    """What the destination has of a table's newest copy, and what came after it from whom."""

    start: EndLsn
    rows: set[Change]
    watermark: Change
    effect: list[Change] = field(default_factory=list)
    delivered: list[Change] = field(default_factory=list)
    by: dict[Change, Actor] = field(default_factory=dict)

    def write(self, changes: list[Change], actor: Actor) -> None:
        for change in changes:
            if change in self.rows:
                raise Violation(f"{change} was in the copy and came again from the {actor}")
            if self.by.setdefault(change, actor) is not actor:
                raise Violation(f"{change} came from both workers")
            self.delivered.append(change)
            if change > self.watermark:
                self.effect.append(change)
                self.watermark = change


@dataclass
class Sync:
    """A table sync worker's memory: one slot and one position for one table or several."""

    tables: set[TableId]
    start: EndLsn = ZERO
    position: EndLsn = ZERO
    confirmed: EndLsn = ZERO
    """From here its slot sends again when its connection is lost."""
    written: EndLsn = ZERO
    """Something of a table was written up to here."""
    asked: set[TableId] = field(default_factory=set)
    """Those that are being handed over; what comes for the others meanwhile is put off."""
    unwritten: dict[TableId, list[Transaction]] = field(default_factory=dict)


@dataclass
class Write:
    """A batch that was sealed: first written, then recorded, then confirmed."""

    end: EndLsn
    tables: dict[TableId, list[Change]]
    step: str = "write"


class Rules:
    """How the engine decides. A test breaks one of them."""

    pauses_during_catchup = True
    records_before_ready = True
    confirms_early = False
    goes_on_past_a_failure = False
    confirms_idle_with_changes_waiting = False
    writes_what_was_put_off = True
    lets_go_of_what_was_handed_over = True
    confirms_with_changes_put_off = False

    def owns(self, commit: CommitLsn, from_lsn: EndLsn) -> bool:
        return commit.at_or_past(from_lsn)

    def catchup_at(self, world: World) -> EndLsn:
        return world.position

    def may_finish(self, sync: Sync, asked: EndLsn) -> bool:
        return sync.position >= max(asked, sync.written)

    def done_at(self, sync: Sync, asked: EndLsn) -> EndLsn:
        return sync.position

    def may_be_ready(self, world: World, lsn: EndLsn) -> bool:
        return world.confirmed >= lsn

    def after_crash(self, state: TableState) -> TableState:
        return state if AFTER_CRASH[state.phase] is state.phase else TableState(AFTER_CRASH[state.phase])

    def start(self, world: World) -> EndLsn:
        return max(world.server_confirmed, world.recorded)


class World:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.crashed = False
        """Or anything else after which changes are delivered again."""
        self.wal = 100
        self.log: list[Transaction] = []
        self.copies: dict[TableId, Copy] = {}
        # The store and the server: what survives a crash.
        self.stored: dict[TableId, TableState] = dict.fromkeys(TABLES, INIT)
        self.recorded = EndLsn(self.wal)
        self.server_confirmed = EndLsn(self.wal)
        self._open()

    def _open(self) -> None:
        """What a run begins with."""
        self.stored = {table: self.rules.after_crash(state) for table, state in self.stored.items()}
        self.states = dict(self.stored)
        self.ownership = ApplyOwnership(cast(Run, SimpleNamespace(table_states=self.states)))
        self.syncs: dict[TableId, Sync] = {}
        self.confirmed = self.rules.start(self)
        self.recorded_in_this_run = ZERO
        self.paused = False
        self.write: Write | None = None
        self._connect()

    def _connect(self) -> None:
        self.position = self.confirmed
        self.read = self._first(self.confirmed)
        self.decoder: list[Transaction] = []

    def _first(self, start: EndLsn) -> int:
        """Where a slot begins to send: at the first transaction whose commit record starts at or past the position."""
        return next((i for i, tx in enumerate(self.log) if tx.commit.at_or_past(start)), len(self.log))

    def move(self, table: TableId, state: TableState, actor: Actor) -> None:
        check_transition(table, self.states[table], state, actor)
        if state.persisted:
            self.stored[table] = state
        self.states[table] = state

    # The source

    def commit(self, n: int) -> None:
        """A transaction over some tables. Its commit record often begins just where the one before it ended."""
        self.wal += (0, 0, 5)[n % 3]
        counts = {table: 1 + n % 2 for i, table in enumerate(TABLES) if n >> i & 1}
        self.log.append(Transaction(CommitLsn(self.wal), EndLsn(self.wal + 3), counts))
        self.wal += 3

    # The apply worker

    def apply_read(self, n: int) -> None:
        taken = self.log[self.read : self.read + 1 + n % 3]
        self.read += len(taken)
        self.decoder += taken

    def apply_begin(self, n: int) -> None:
        if self.write is not None or not self.decoder or (self.paused and self.rules.pauses_during_catchup):
            return
        tables: dict[TableId, list[Change]] = {}
        for table in TABLES:
            from_lsn = self.ownership._from(table)
            if from_lsn is not None:
                owned = [tx for tx in self.decoder if self.rules.owns(tx.commit, from_lsn)]
                tables[table] = [change for tx in owned for change in tx.changes(table)]
        self.position = self.decoder[-1].end
        self.decoder = []
        if not any(tables.values()):
            self.confirmed = self.position
            return
        self.write = Write(self.position, tables)
        if self.rules.confirms_early:
            self.confirmed = self.recorded = self.position

    def apply_write(self, n: int) -> None:
        """The destination writes; now and then it fails one table, which is recorded before progress is."""
        if self.write is None or self.write.step != "write":
            return
        failing = TABLES[n % 3] if n > 20 else None
        for table, changes in self.write.tables.items():
            if table == failing and changes:
                self.move(table, errored(DestinationError("no")), Actor.APPLY)
            else:
                self.copies[table].write(changes, Actor.APPLY)
        self.write.step = "record"

    def apply_record(self, n: int) -> None:
        if self.write is not None and self.write.step == "record":
            self._record(self.write.end)
            self.write.step = "confirm"

    def _record(self, position: EndLsn) -> None:
        self.recorded = max(self.recorded, position)
        self.recorded_in_this_run = position

    def apply_confirm(self, n: int) -> None:
        if self.write is not None and self.write.step == "confirm":
            self.confirmed, self.write = max(self.confirmed, self.write.end), None

    def apply_idle(self, n: int) -> None:
        """A keepalive: everything up to the server's position was sent, and nothing of it is left to write."""
        waiting = bool(self.decoder) and not self.rules.confirms_idle_with_changes_waiting
        if self.write is None and self.read == len(self.log) and not waiting:
            self.position = self.confirmed = max(self.confirmed, EndLsn(self.wal))

    def apply_hand_over(self, n: int) -> None:
        for table in self._in(Phase.SYNC_WAIT):
            self.move(table, catchup(self.rules.catchup_at(self)), Actor.APPLY)
        self.paused = bool(self._in(Phase.CATCHUP))
        for table, state in self._in(Phase.SYNC_DONE).items():
            lsn = state.lsn or ZERO
            if self.rules.may_be_ready(self, lsn):
                if self.rules.records_before_ready and self.recorded_in_this_run < lsn:
                    self._record(self.confirmed)
                self.move(table, READY, Actor.APPLY)

    def _in(self, phase: Phase) -> dict[TableId, TableState]:
        return {table: state for table, state in self.states.items() if state.phase is phase}

    def apply_reconnect(self, n: int) -> None:
        """The connection was lost: the batch under way ends first, what was only read comes again."""
        self._end_write()
        self._connect()

    def _end_write(self) -> None:
        for step in (self.apply_write, self.apply_record, self.apply_confirm):
            step(0)

    def server_learns(self, n: int) -> None:
        self.server_confirmed = max(self.server_confirmed, self.confirmed)

    # Table sync workers

    def sync_start(self, n: int) -> None:
        """One worker for some of the tables that wait: one, or a group."""
        tables = {table for table in some_tables(n) if self.states[table] == INIT}
        for table in tables:
            self.move(table, DATA_SYNC, Actor.TABLE_SYNC)
        self.syncs |= dict.fromkeys(tables, Sync(tables))

    def sync_copy(self, n: int) -> None:
        """All tables of a worker at one snapshot."""
        sync = self.syncs.get(TABLES[n % 3])
        if sync is None or sync.start != ZERO:
            return
        sync.start = sync.position = sync.confirmed = EndLsn(self.wal)
        for table in sync.tables:
            rows = {change for tx in self.log for change in tx.changes(table)}
            self.copies[table] = Copy(sync.start, rows, (sync.start.value, -1))
            self.move(table, FINISHED_COPY, Actor.TABLE_SYNC)

    def sync_follow(self, n: int) -> None:
        """Reads on from its own slot and writes, or puts off what nobody asked for; a keepalive says how far it is."""
        sync = self.syncs.get(TABLES[n % 3])
        if sync is None or sync.start == ZERO:
            return
        first = self._first(sync.position)
        taken = self.log[first : first + 1 + n % 2]
        for table in sync.tables:
            sync.unwritten.setdefault(table, []).extend(taken)
        sync.position = max(sync.position, taken[-1].end if taken else EndLsn(self.wal))
        self._write_out(sync, sync.asked or sync.tables)
        self._sync_confirm(sync)

    def _sync_confirm(self, sync: Sync) -> None:
        for table in sync.unwritten.keys() - sync.tables:
            del sync.unwritten[table]
        if not any(sync.unwritten.values()) or self.rules.confirms_with_changes_put_off:
            sync.confirmed = sync.position

    def sync_reconnect(self, n: int) -> None:
        """The connection was lost: what was not confirmed comes again, also what some of its tables have written."""
        sync = self.syncs.get(TABLES[n % 3])
        if sync is None or sync.start == ZERO:
            return
        self.crashed = True
        sync.position = sync.confirmed
        sync.unwritten.clear()

    def _write_out(self, sync: Sync, tables: set[TableId]) -> None:
        for table in tables:
            for tx in sync.unwritten.pop(table, []):
                self.copies[table].write(tx.changes(table), Actor.TABLE_SYNC)
                sync.written = max(sync.written, tx.end)

    def sync_ask(self, n: int) -> None:
        """For one of its tables, for some, or for all, whether everything of theirs is written or not."""
        sync = self.syncs.get(TABLES[n % 3])
        if sync is None or sync.start == ZERO or sync.asked:
            return
        sync.asked = {table for table in some_tables(n) & sync.tables if self.syncs.get(table) is sync}
        for table in sync.asked:
            self.move(table, SYNC_WAIT, Actor.TABLE_SYNC)

    def sync_finish(self, n: int) -> None:
        sync = self.syncs.get(TABLES[n % 3])
        for table in sorted(sync.asked) if sync is not None else ():
            assert sync is not None
            state = self.states[table]
            if state.phase is Phase.CATCHUP and state.lsn is not None and self.rules.may_finish(sync, state.lsn):
                if self.rules.writes_what_was_put_off:
                    self._write_out(sync, {table})
                self.move(table, sync_done(self.rules.done_at(sync, state.lsn)), Actor.TABLE_SYNC)
                self._let_go(table, sync)
        if sync is not None:
            self._sync_confirm(sync)

    def _let_go(self, table: TableId, sync: Sync) -> None:
        sync.asked.discard(table)
        if self.rules.lets_go_of_what_was_handed_over:
            sync.tables.discard(table)
        del self.syncs[table]

    def sync_fail(self, n: int) -> None:
        """Of a group, one table alone, or what they share."""
        sync = self.syncs.get(TABLES[n % 3])
        if sync is None or sync.start == ZERO:
            return
        for table in sorted(sync.tables) if n & 2 else [TABLES[n % 3]]:
            to = INIT if n & 1 else errored(DestinationError("no"))
            self.move(table, to, Actor.TABLE_SYNC)
            sync.tables.discard(table)
            sync.asked.discard(table)
            del self.syncs[table]

    def retry_errored(self, n: int) -> None:
        for table in self._in(Phase.ERRORED):
            self.move(table, INIT, Actor.PIPELINE)

    # The end of a run

    def crash(self, n: int) -> None:
        """Everything in memory is gone; the server may or may not have kept what was confirmed last."""
        self.crashed = True
        if n & 1:
            self.server_learns(n)
        self._open()

    def stop(self, n: int) -> None:
        """An orderly stop, at times with a destination that fails: then nothing behind the failed batch may be recorded."""
        if n % 4 and self.write is not None and self.write.step == "write":
            if not self.rules.goes_on_past_a_failure:
                self.crash(1)
                return
            self.write = None
        self._end_write()
        self.paused = bool(self._in(Phase.CATCHUP))
        if not self.paused:
            self.apply_begin(0)
            self._end_write()
        self.server_learns(0)
        self._open()


CRASHES = ("crash", "stop")
ACTIONS = (
    "commit",
    "apply_read",
    "apply_begin",
    "apply_write",
    "apply_record",
    "apply_confirm",
    "apply_idle",
    "apply_hand_over",
    "apply_reconnect",
    "server_learns",
    "sync_start",
    "sync_copy",
    "sync_follow",
    "sync_ask",
    "sync_finish",
    "sync_fail",
    "retry_errored",
    "sync_reconnect",
    *CRASHES,
)
TROUBLE = (*CRASHES, "sync_fail", "sync_reconnect", "apply_reconnect", "retry_errored")
WORK = tuple(
    name for name in ACTIONS if name not in (*CRASHES, "commit", "apply_reconnect", "sync_reconnect", "sync_fail")
)


def settle(world: World) -> None:
    """Let everyone work, in turn and without trouble, until all is done: within some rounds, or they stand still for ever."""
    for _ in range(40 + 4 * len(world.log)):
        for name in WORK:
            for n in range(3):
                getattr(world, name)(n)
        caught_up = world.write is None and world.confirmed.value >= world.wal
        if caught_up and len(world._in(Phase.READY)) == len(TABLES):
            return
    raise Violation(f"nobody gets on: {world.states}")


def check(world: World) -> None:
    """Every change of every table has its effect once and in order, and without a crash it was delivered just once."""
    for table in TABLES:
        copy = world.copies[table]
        expected = [change for tx in world.log if tx.commit.at_or_past(copy.start) for change in tx.changes(table)]
        every = {change for tx in world.log for change in tx.changes(table)}
        if copy.rows | set(expected) != every:
            raise Violation(f"table {table}: the copy and what follows it do not make the whole")
        if copy.effect != expected:
            raise Violation(f"table {table}: the effect is {copy.effect} instead of {expected}")
        if not world.crashed and copy.delivered != expected:
            raise Violation(f"table {table}: delivered {copy.delivered} instead of {expected}")


def play(rules: Rules, schedule: list[tuple[str, int]]) -> World:
    world = World(rules)
    for name, n in schedule:
        step: Any = getattr(world, name)
        step(n)
    settle(world)
    check(world)
    return world
