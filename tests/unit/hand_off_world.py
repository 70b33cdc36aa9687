"""A world for the hand-off's own code: a source, a store, a destination, and workers that do what `engine.hand_off` decides.

One step of one worker at a time, in any order, with lost connections and crashes. States, transitions, what a crash leaves, and
the decisions of the two sides are the product's code; a test puts a broken one in its place. What is written here is only
what surrounds them, and the checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headwater.engine.hand_off import ApplyHandOff, MayAnswer, Positions, TableSyncHandOff, in_phase, start_position
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
    check_transition,
    errored,
)

TABLES = (TableId(1), TableId(2), TableId(3))
Change = tuple[int, int]
"""The sequence key: commit LSN and ordinal."""


def some_tables(n: int) -> set[TableId]:
    """One of them, and perhaps others."""
    return {TABLES[n % 3]} | {table for i, table in enumerate(TABLES) if n // 3 >> i & 1}


class Violation(Exception):
    """A change was lost, doubled or out of order, or the workers make no progress."""


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


def after_crash(state: TableState) -> TableState:
    phase = AFTER_CRASH[state.phase]
    return state if phase is state.phase else TableState(phase)


@dataclass(frozen=True)
class Rules:
    """The decisions: the product's, unless a test breaks one of them."""

    apply: type[ApplyHandOff] = ApplyHandOff
    sync: type[TableSyncHandOff] = TableSyncHandOff
    start: Callable[[EndLsn | None, EndLsn | None], EndLsn | None] = start_position
    after_crash: Callable[[TableState], TableState] = after_crash
    idle_with_changes_waiting: bool = False
    """Whether the decoder calls a stream idle although changes wait to be sealed."""


@dataclass
class Sync:
    """A table sync worker: one slot for one table or several."""

    hand_off: TableSyncHandOff
    copied: bool = False
    unwritten: dict[TableId, list[Transaction]] = field(default_factory=dict)

    @property
    def positions(self) -> Positions:
        return self.hand_off.positions


@dataclass
class Write:
    """A batch at the destination."""

    tables: dict[TableId, list[Change]]
    is_written: bool = False


class World:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.crashed = False
        """Or anything else after which changes are delivered again."""
        self.wal = 100
        self.log: list[Transaction] = []
        self.copies: dict[TableId, Copy] = {}
        self.needs_stream_from: dict[TableId, EndLsn] = {}
        """A stream that began before it is not sent the table's changes."""
        # The store and the server: what survives a crash.
        self.stored: dict[TableId, TableState] = dict.fromkeys(TABLES, INIT)
        self.recorded = EndLsn(self.wal)
        self.server_confirmed = EndLsn(self.wal)
        self._open()

    def _open(self) -> None:
        """What a run begins with."""
        self.stored = {table: self.rules.after_crash(state) for table, state in self.stored.items()}
        self.states = dict(self.stored)
        self.syncs: dict[TableId, Sync] = {}
        start = self.rules.start(self.server_confirmed, self.recorded)
        assert start is not None
        self.apply = self.rules.apply(Positions.at(start))
        self.write: Write | None = None
        self._connect()

    @property
    def positions(self) -> Positions:
        return self.apply.positions

    def _connect(self) -> None:
        self.apply.dropped()
        self.positions.connected(self.positions.confirmed)
        self.read = self._first(self.positions.began)
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
        if self.decoder and self.apply.may_begin(self.states):
            self._begin()

    def _begin(self) -> None:
        end, tables = self._seal()
        confirm = self.apply.sealed(end, has_changes=any(tables.values()))
        if confirm is not None:
            self.apply.confirmed(confirm)
        else:
            self.write = Write(tables)

    def _seal(self) -> tuple[EndLsn, dict[TableId, list[Change]]]:
        tables: dict[TableId, list[Change]] = {}
        for table in TABLES:
            from_lsn = self.apply.owned_from(self.states[table])
            if from_lsn is not None and self.needs_stream_from.get(table, ZERO) <= self.positions.began:
                owned = [tx for tx in self.decoder if tx.commit.at_or_past(from_lsn)]
                tables[table] = [change for tx in owned for change in tx.changes(table)]
        end, self.decoder = self.decoder[-1].end, []
        return end, tables

    def apply_read_on(self, n: int) -> None:
        """The destination waits for what follows the batch: it is added to the batch."""
        if self.write is None or self.write.is_written or not self.decoder or not self.apply.may_extend(self.states):
            return
        end, tables = self._seal()
        for table, changes in tables.items():
            self.write.tables.setdefault(table, []).extend(changes)
        self.apply.sealed(end, has_changes=True)

    def apply_write(self, n: int) -> None:
        """The destination writes; now and then it fails one table, which is recorded before progress is."""
        if self.write is None or self.write.is_written:
            return
        failing = TABLES[n % 3] if n > 20 else None
        for table, changes in self.write.tables.items():
            if table == failing and changes:
                self.move(table, errored(DestinationError("no")), Actor.APPLY)
            else:
                self.copies[table].write(changes, Actor.APPLY)
        self.write.is_written = True
        self.apply.written()

    def apply_record(self, n: int) -> None:
        position = self.apply.to_record()
        if position is not None:
            self._record(position)

    def _record(self, position: EndLsn) -> None:
        self.recorded = max(self.recorded, position)
        self.apply.recorded(position)

    def apply_confirm(self, n: int) -> None:
        position = self.apply.to_confirm()
        if position is not None:
            self.apply.confirmed(position)
        if self.write is not None and self.write.is_written and self.positions.confirmed >= self.positions.sealed:
            self.write = None

    def apply_idle(self, n: int) -> None:
        """A keepalive: everything up to the server's position was sent, and nothing of it waits to be sealed."""
        waits = bool(self.decoder) and not self.rules.idle_with_changes_waiting
        if self.read == len(self.log):
            position = self.apply.idle(None if waits else EndLsn(self.wal))
            if position is not None:
                self.apply.confirmed(position)

    def apply_answer(self, n: int) -> None:
        asking = in_phase(self.states, Phase.SYNC_WAIT)
        if not asking:
            return
        needed = max(self.needs_stream_from.get(table, ZERO) for table in asking)
        may = self.apply.may_answer(needed)
        if may is MayAnswer.FOLLOW_AGAIN:
            self._end_write()
            self._connect()
        elif may is MayAnswer.YES:
            position = self.apply.to_record_before_answering(needed)
            if position is not None:
                self._record(position)
            for table in asking:
                self.move(table, self.apply.answer(), Actor.APPLY)

    def apply_take_over(self, n: int) -> None:
        take_over = self.apply.take_over(self.states)
        if take_over.record is not None:
            self._record(take_over.record)
        for table in take_over.ready:
            self.move(table, READY, Actor.APPLY)

    def apply_reconnect(self, n: int) -> None:
        """The connection was lost: the batch under way ends first, what was only read comes again."""
        self._end_write()
        self._connect()

    def _end_write(self) -> None:
        for step in (self.apply_write, self.apply_record, self.apply_confirm):
            step(0)

    def server_learns(self, n: int) -> None:
        self.server_confirmed = max(self.server_confirmed, self.positions.confirmed)

    # Table sync workers

    def sync_start(self, n: int) -> None:
        """One worker for some of the tables that wait: one, or a group."""
        tables = {table for table in some_tables(n) if self.states[table] == INIT}
        for table in tables:
            self.move(table, DATA_SYNC, Actor.TABLE_SYNC)
        self.syncs |= dict.fromkeys(tables, Sync(self.rules.sync(tables, Positions.at(ZERO))))

    def sync_copy(self, n: int) -> None:
        """All tables of a worker at one snapshot. Now and then what a table is published as has changed just before."""
        sync = self.syncs.get(TABLES[n % 3])
        if sync is None or sync.copied:
            return
        start = EndLsn(self.wal)
        sync.copied, sync.hand_off = True, self.rules.sync(sync.hand_off.tables, Positions.at(start))
        for table in sync.hand_off.tables:
            rows = {change for tx in self.log for change in tx.changes(table)}
            self.copies[table] = Copy(start, rows, (start.value, -1))
            self.move(table, FINISHED_COPY, Actor.TABLE_SYNC)
            if n >= 16:
                self.needs_stream_from[table] = start

    def _following(self, n: int) -> Sync | None:
        sync = self.syncs.get(TABLES[n % 3])
        return sync if sync is not None and sync.copied else None

    def sync_follow(self, n: int) -> None:
        """Reads on from its own slot and writes, or defers; a keepalive says how far it is."""
        sync = self._following(n)
        if sync is None:
            return
        first = self._first(sync.positions.sealed)
        taken = self.log[first : first + 1 + n % 2]
        for table in sync.hand_off.tables:
            sync.unwritten.setdefault(table, []).extend(tx for tx in taken if tx.counts.get(table))
        sync.hand_off.deferring([table for table, waiting in sync.unwritten.items() if waiting])
        sync.hand_off.advanced(taken[-1].end if taken else EndLsn(self.wal))
        self._write_out(sync)
        self._sync_confirm(sync)

    def _write_out(self, sync: Sync) -> None:
        end = ZERO
        for table in sync.hand_off.to_write():
            for tx in sync.unwritten.pop(table, []):
                self.copies[table].write(tx.changes(table), Actor.TABLE_SYNC)
                end = max(end, tx.end)
        sync.hand_off.wrote(end, [table for table, waiting in sync.unwritten.items() if waiting])

    def _sync_confirm(self, sync: Sync) -> None:
        position = sync.hand_off.to_confirm()
        if position is not None:
            sync.hand_off.confirmed(position)

    def sync_reconnect(self, n: int) -> None:
        """The connection was lost: what was not confirmed comes again, also what some of its tables have written."""
        sync = self._following(n)
        if sync is None:
            return
        self.crashed = True
        sync.hand_off.lost_connection()
        sync.unwritten.clear()

    def sync_ask(self, n: int) -> None:
        """For one of its tables, for some, or for all, whether everything of theirs is written or not."""
        sync = self._following(n)
        if sync is None or sync.hand_off.asked:
            return
        asked = sync.hand_off.ask(self.states, n % 4)
        if fewer := asked & some_tables(n):
            asked.intersection_update(fewer)
        for table in asked:
            self.move(table, SYNC_WAIT, Actor.TABLE_SYNC)

    def sync_finish(self, n: int) -> None:
        sync = self._following(n)
        target = sync.hand_off.target(self.states) if sync is not None else None
        if sync is None or target is None:
            return
        self._write_out(sync)
        done = sync.hand_off.to_hand_over(self.states, target)
        for table, state in done.items():
            self.move(table, state, Actor.TABLE_SYNC)
            del self.syncs[table]
        sync.hand_off.handed_over(done)
        self._keep(sync)
        self._sync_confirm(sync)

    def _keep(self, sync: Sync) -> None:
        for table in sync.unwritten.keys() - sync.hand_off.tables:
            del sync.unwritten[table]

    def sync_fail(self, n: int) -> None:
        """Of a group, one table alone, or what they share."""
        sync = self._following(n)
        if sync is None:
            return
        failed = {table for table in TABLES if self.syncs.get(table) is sync} if n & 2 else {TABLES[n % 3]}
        for table in sorted(failed):
            to = INIT if n & 1 else errored(DestinationError("no"))
            self.move(table, to, Actor.TABLE_SYNC)
            del self.syncs[table]
        sync.hand_off.keep(sync.hand_off.tables - failed)
        self._keep(sync)

    def retry_errored(self, n: int) -> None:
        for table in in_phase(self.states, Phase.ERRORED):
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
        if n % 4 and self.write is not None and not self.write.is_written:
            self.crashed = True
            self.write = None
            self.apply.dropped()
        self._end_write()
        if self.decoder and self.apply.may_begin_last(self.states):
            self._begin()
            self._end_write()
        self.server_learns(0)
        self._open()


CRASHES = ("crash", "stop")
ACTIONS = (
    "commit",
    "apply_read",
    "apply_begin",
    "apply_read_on",
    "apply_write",
    "apply_record",
    "apply_confirm",
    "apply_idle",
    "apply_answer",
    "apply_take_over",
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
FAILURES = (*CRASHES, "sync_fail", "sync_reconnect", "apply_reconnect", "retry_errored")
WORK = tuple(
    name for name in ACTIONS if name not in (*CRASHES, "commit", "apply_reconnect", "sync_reconnect", "sync_fail")
)


def settle(world: World) -> None:
    """Let all workers work, in turn and without failures, until all is done: within some rounds, or they make no progress."""
    for _ in range(40 + 4 * len(world.log)):
        for name in WORK:
            for n in range(3):
                getattr(world, name)(n)
        caught_up = world.write is None and world.positions.confirmed.value >= world.wal
        if caught_up and len(in_phase(world.states, Phase.READY)) == len(TABLES):
            return
    raise Violation(f"no progress: {world.states}")


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
