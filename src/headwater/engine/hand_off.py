"""The hand-off of a table from its copy to the apply worker: who owns which change, and what may be sealed, recorded, confirmed.
No I/O, no clock, no thread.

Theory of operation. While a table is copied, two slots send its changes: the table sync worker's own, and the pipeline's. Each
change must be written from exactly one of them.

    table sync worker                              apply worker

    copies at its slot's consistent point          drops the table's changes
    follows its slot: writes, records, confirms
    is close to the server's position: SyncWait
                                                   has begun a batch, or has none to begin: Catchup(p), p = what it has
                                                   sealed; seals nothing more while a table is in Catchup
    has written all up to p: SyncDone(d), d >= p
                                                   writes the table's transactions from d on
                                                   has confirmed d: records its progress, then Ready

Positions and what depends on them (`Positions` names them):

- A transaction is the apply worker's if its commit LSN is at or past d. A commit record may begin exactly at d.
- p is the sealed position, not the confirmed one: the batch that is being written lies between the two, and was sealed without
  the table's changes.
- While a table is in Catchup, the apply worker seals nothing: neither a batch, nor what follows a batch that is read on. It
  would leave out the table's changes beyond d, and d is not known yet.
- d is where the table sync worker is when it hands over. It is at least p, and at least all that it has ever written: after a
  lost connection its slot sends changes again that it has written, and handed over in the middle of those they would be
  written by both.
- Ready does not say where the hand-off was. A position without a change of ours is confirmed without being recorded, and the
  server may lose the confirmation in a crash. So progress at or past d is on record before Ready is.
- A table sync worker of several tables hands over some of them first. Changes of the others, which come meanwhile, are
  deferred; nothing is confirmed while there are any, since the slot would not send them again.

A lost connection sets back what was sealed to what was confirmed; deferred changes are dropped and come again. A crash leaves
what `states.AFTER_CRASH` says, and the pipeline's slot is followed from `start_position`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from headwater.lsn import ZERO, EndLsn
from headwater.schema.table import TableId
from headwater.states import Phase, TableState, catchup, sync_done

States = Mapping[TableId, TableState]

CLOSE_BYTES = 1 << 20
"""So near to the server's position, the rest is a matter of milliseconds."""
STILL_GAINING = 0.7
"""Under steady traffic the distance shrinks to what is committed during one write, and no further: then it is time to ask."""
FAR_BYTES = 128 << 20
"""Further away than this, all other tables would wait for long. The worker asks from there only if it does not come nearer."""
COMES_NEARER = 0.98
LOOKS_WITHOUT_COMING_NEARER = 20
MOST_DEFERRED_BYTES = 16 << 20
"""With more than this deferred, the last write of the tables that follow would take long."""


@dataclass(slots=True)
class Positions:
    """How far the follower of a slot is. Each is the end of a transaction, or a position up to which nothing of ours is left."""

    received: EndLsn
    """The server has sent everything up to here."""
    sealed: EndLsn
    """Everything before it is in a batch, or is no change of this follower's tables."""
    written: EndLsn
    """The end of the newest batch that the destination was given whole, or but for tables that are deferred. May be past `sealed`
    after a lost connection."""
    recorded: EndLsn
    """The newest progress that was recorded in this run."""
    confirmed: EndLsn
    """What the server was told. A new connection begins here."""
    began: EndLsn
    """Where the connection began."""

    @classmethod
    def at(cls, start: EndLsn) -> Positions:
        return cls(received=start, sealed=start, written=start, recorded=ZERO, confirmed=start, began=start)

    def connected(self, start: EndLsn) -> None:
        """A new connection: whatever was not confirmed comes again. On another timeline `start` may be another position."""
        self.received = self.sealed = self.confirmed = self.began = start


def start_position(confirmed: EndLsn | None, recorded: EndLsn | None) -> EndLsn | None:
    """Where the pipeline's slot is followed from: what the server has of our confirmations, or recorded progress if that is
    further. The server keeps a confirmation in memory at first, and may come back with an older one."""
    return max((position for position in (confirmed, recorded) if position is not None), default=None)


def in_phase(states: States, *phases: Phase) -> dict[TableId, TableState]:
    return {table: state for table, state in states.items() if state.phase in phases}


class MayAnswer(Enum):
    YES = "yes"
    FOLLOW_AGAIN = "follow the slot again first"
    NOT_YET = "not before more is confirmed"


@dataclass(frozen=True, slots=True)
class TakeOver:
    """What the apply worker does about tables in SyncDone."""

    record: EndLsn | None
    """Progress to record first, if any."""
    ready: States
    """These become Ready, if they are still in the state given here."""
    waits: bool
    """Others are further than what is confirmed."""


class ApplyHandOff:
    """The apply worker's side. It is told what has happened, and says what may happen next."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions
        self._batch: EndLsn | None = None
        """The end of the batch that is under way: sealed, and not confirmed yet."""
        self._is_written = self._is_recorded = False

    # Whose changes

    def owned_from(self, state: TableState | None) -> EndLsn | None:
        """The apply worker owns the table's transactions whose commit LSN is at or past this; None: no transaction."""
        if state is None:
            return None
        if state.phase is Phase.READY:
            return ZERO
        return state.lsn if state.phase is Phase.SYNC_DONE else None

    # Batches: sealed, written, recorded, confirmed

    def may_begin(self, states: States) -> bool:
        return self._batch is None and not in_phase(states, Phase.CATCHUP)

    def may_extend(self, states: States) -> bool:
        """Whether what followed the batch under way may be sealed and added to it."""
        return self._batch is not None and not in_phase(states, Phase.CATCHUP)

    def may_begin_last(self, states: States) -> bool:
        """At an orderly stop. Behind a batch that was not written, nothing may be recorded."""
        return self.may_begin(states) and self.positions.sealed <= self.positions.confirmed

    def sealed(self, end: EndLsn, *, has_changes: bool) -> EndLsn | None:
        """A batch was sealed, or what follows the batch under way was added to it. Returns what may be confirmed at once.

        Without a change of ours nothing is written or recorded: a record would make WAL, and a store in the source would
        feed its own stream (invariant 9).
        """
        self.positions.sealed = end
        if not has_changes and self._batch is None:
            return end
        self._batch = end
        self._is_written = self._is_recorded = False
        return None

    def written(self) -> None:
        assert self._batch is not None
        self.positions.written = self._batch
        self._is_written = True

    def to_record(self) -> EndLsn | None:
        """The progress to record: of a batch that the destination has (invariant 2)."""
        return self._batch if self._is_written else None

    def recorded(self, position: EndLsn) -> None:
        self.positions.recorded = max(self.positions.recorded, position)
        self._is_recorded = self._is_written and self._batch is not None and position >= self._batch

    def to_confirm(self) -> EndLsn | None:
        """The position to confirm: of a batch that is recorded (invariant 2)."""
        return self._batch if self._is_recorded else None

    def confirmed(self, position: EndLsn) -> None:
        self.positions.confirmed = max(self.positions.confirmed, position)
        if self._batch is not None and position >= self._batch:
            self.dropped()

    def dropped(self) -> None:
        """No batch is under way any more. What was not confirmed of it comes again over the next connection."""
        self._batch = None
        self._is_written = self._is_recorded = False

    def idle(self, position: EndLsn | None) -> EndLsn | None:
        """What may be confirmed if everything before `position` was received, and nothing of it waits to be sealed."""
        if self._batch is not None or position is None or position <= self.positions.sealed:
            return None
        self.positions.sealed = position
        return position

    # Tables that ask, and tables that were handed over

    def may_answer(self, stream_needed_from: EndLsn) -> MayAnswer:
        """The server's session reads what a partition is published as when it first meets it. Where that has changed, only a
        stream that begins after the change sends the partition's rows."""
        if stream_needed_from <= self.positions.began:
            return MayAnswer.YES
        return MayAnswer.FOLLOW_AGAIN if self.positions.confirmed >= stream_needed_from else MayAnswer.NOT_YET

    def to_record_before_answering(self, stream_needed_from: EndLsn) -> EndLsn | None:
        """The next run must not begin its stream before that position either, and it begins where progress is on record."""
        if stream_needed_from == ZERO or self.positions.recorded >= stream_needed_from:
            return None
        return self.positions.confirmed

    def answer(self) -> TableState:
        return catchup(self.positions.sealed)

    def take_over(self, states: States) -> TakeOver:
        handed = in_phase(states, Phase.SYNC_DONE)
        reached = {table: state for table, state in handed.items() if self._has_reached(state)}
        record = None
        if any(self.positions.recorded < (state.lsn or ZERO) for state in reached.values()):
            record = self.positions.confirmed
        return TakeOver(record, reached, waits=len(handed) > len(reached))

    def _has_reached(self, state: TableState) -> bool:
        return self.positions.confirmed >= (state.lsn or ZERO)


class TableSyncHandOff:
    """A table sync worker's side, for all its tables."""

    def __init__(self, tables: Collection[TableId], positions: Positions) -> None:
        self.positions = positions
        self.tables = set(tables)
        """Those that are still the worker's."""
        self.asked: set[TableId] = set()
        """Those that are being handed over."""
        self.deferred: set[TableId] = set()
        """Those with changes that were sealed and not written."""
        self._busy: set[TableId] = set()
        self._reads_on_until = ZERO
        self._distance = self._nearest = math.inf
        self._looks_without_coming_nearer = 0

    def keep(self, tables: Collection[TableId]) -> None:
        """The other tables are no longer the worker's: handed over, failed, or stopped."""
        self.tables.intersection_update(tables)
        self.asked.intersection_update(tables)
        self.deferred.intersection_update(tables)

    # Asking

    def may_ask(self, distance_bytes: int, *, gaining: bool) -> bool:
        """Whether the worker is close enough to the server's position. `gaining`: it has just come further."""
        before, self._distance = self._distance, distance_bytes
        if distance_bytes < CLOSE_BYTES:
            return True
        if not gaining or distance_bytes <= before * STILL_GAINING:
            return False
        return distance_bytes < FAR_BYTES or self._comes_no_nearer(distance_bytes)

    def _comes_no_nearer(self, distance_bytes: int) -> bool:
        if distance_bytes < self._nearest * COMES_NEARER:
            self._nearest, self._looks_without_coming_nearer = distance_bytes, 0
            return False
        self._looks_without_coming_nearer += 1
        return self._looks_without_coming_nearer >= LOOKS_WITHOUT_COMING_NEARER

    def may_ask_next(self, deferred_bytes: int) -> bool:
        """For the next tables of a group: what was deferred is written with what comes until it is their turn."""
        if self.asked or self._reads_on_until != ZERO:
            return False
        return bool(self.deferred) and deferred_bytes <= MOST_DEFERRED_BYTES

    def ask(self, states: States, written_at_once: int) -> set[TableId]:
        """The tables to ask for: all, as long as no other table's changes would wait; else first those without changes, then as
        many of those with changes as the apply worker's batches have tables."""
        self.asked = set(self.tables)
        if in_phase(states, Phase.READY, Phase.SYNC_DONE):
            few = sorted(self.tables)[: max(1, written_at_once)]
            self.asked = (self.tables - self._busy) or set(few)
        return self.asked

    def answered(self, states: States) -> EndLsn | None:
        """Where the apply worker is, once it has answered. It begins no batch from then on."""
        catching_up = (states[table] for table in self.asked if table in states)
        answers = (state.lsn for state in catching_up if state.phase is Phase.CATCHUP)
        return max((lsn for lsn in answers if lsn is not None), default=None)

    # Changes

    def to_write(self) -> set[TableId]:
        """Whose changes are written now; those of other tables are deferred."""
        return set(self.asked or self.tables)

    def lets_others_go_first(self, states: States) -> bool:
        """The apply worker waits for tables of another worker: every core is theirs until they are handed over."""
        return not self.asked and bool(in_phase(states, Phase.CATCHUP))

    def awaits(self, whole_until: EndLsn) -> bool:
        """Whether more has to be read before anything is written: for a value that was read from the source."""
        return whole_until < self._reads_on_until

    def deferring(self, deferred: Collection[TableId]) -> None:
        """A batch was sealed; these tables have changes now that are not written."""
        self.deferred = set(deferred) & self.tables
        self._busy = set(self.deferred)

    def advanced(self, position: EndLsn) -> None:
        """Everything before `position` was sealed."""
        self.positions.sealed = max(self.positions.sealed, position)

    def wrote(self, end: EndLsn, left: Collection[TableId], *, reads_on_until: EndLsn = ZERO) -> None:
        """Changes up to `end` were written, except those of the tables in `left`."""
        self.positions.written = max(self.positions.written, end)
        self.deferred = set(left) & self.tables
        self._reads_on_until = reads_on_until

    def target(self, states: States) -> EndLsn | None:
        """Up to where those that were asked for have to be written before they are handed over; None without an answer."""
        answered = self.answered(states)
        return None if answered is None else max(answered, self.positions.written, self._reads_on_until)

    def to_hand_over(self, states: States, target: EndLsn) -> Mapping[TableId, TableState]:
        """The tables to hand over now, each with its next state; none while something is left to write."""
        if self.positions.sealed < target or not self.deferred.isdisjoint(self.asked):
            return {}
        done = sync_done(self.positions.sealed)
        return {table: done for table in self.asked if table in states and states[table].phase is Phase.CATCHUP}

    def handed_over(self, tables: Collection[TableId]) -> None:
        self.keep(self.tables.difference(tables))

    def to_confirm(self) -> EndLsn | None:
        """The position to confirm, if there is a new one."""
        is_new = self.positions.sealed > self.positions.confirmed
        return self.positions.sealed if is_new and not self.deferred else None

    def confirmed(self, position: EndLsn) -> None:
        self.positions.confirmed = max(self.positions.confirmed, position)

    def lost_connection(self) -> None:
        """Whatever was not confirmed comes again."""
        self.positions.connected(self.positions.confirmed)
        self.deferred.clear()
        self._reads_on_until = ZERO
        self._distance = self._nearest = math.inf
        self._looks_without_coming_nearer = 0
