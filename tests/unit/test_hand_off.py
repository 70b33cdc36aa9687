"""No interleaving of the workers, and no crash, loses or doubles a change; and this test would see one that does."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine.hand_off import (
    FAR_BYTES,
    LOOKS_WITHOUT_COMING_NEARER,
    ApplyHandOff,
    MayAnswer,
    Positions,
    States,
    TableSyncHandOff,
    TakeOver,
)
from headwater.errors import StateError
from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.states import FINISHED_COPY, Actor, TableState, catchup, sync_done
from tests.unit.hand_off_world import ACTIONS, CRASHES, FAILURES, TABLES, Rules, Violation, after_crash, play

_NUMBERS = st.integers(0, 23)


def schedules(actions: tuple[str, ...]) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(actions), _NUMBERS), max_size=150)


@pytest.mark.promise("each state is killed and restarted")
@pytest.mark.promise("no change is lost or doubled, whoever is quicker")
@given(schedules(ACTIONS))
@settings(max_examples=150, deadline=None)
def test_no_interleaving_and_no_crash_loses_or_doubles_a_change(schedule: list[tuple[str, int]]) -> None:
    play(Rules(), schedule)


@pytest.mark.promise("no change is lost or doubled, whoever is quicker")
@given(schedules(tuple(name for name in ACTIONS if name not in (*CRASHES, "sync_reconnect"))))
@settings(max_examples=100, deadline=None)
def test_without_a_crash_every_change_is_delivered_exactly_once(schedule: list[tuple[str, int]]) -> None:
    assert not play(Rules(), schedule).crashed


def seeded(seed: int) -> list[tuple[str, int]]:
    """A long schedule in which some are quicker than others, each time other ones: so deep states are reached, and odd ones."""
    choose = random.Random(seed)
    speeds = {actor: choose.choice((1.0, 4.0, 10.0)) for actor in ("commit", "apply", "sync")}
    speeds["apply"] *= 2
    speeds["server"] = choose.choice((0.0, 0.1, 4.0))
    tables = [choose.choice((1, 1, 8)) for _ in TABLES]
    failures = choose.choice((0.0, 0.05, 0.3))
    weights = [failures if name in FAILURES else speeds[name.split("_")[0]] for name in ACTIONS]
    schedule = []
    for name in choose.choices(ACTIONS, weights, k=choose.randint(50, 500)):
        n = choose.randrange(24)
        if name.startswith("sync"):
            (table,) = choose.choices(range(len(TABLES)), tables)
            n += table - n % len(TABLES)
        schedule.append((name, n))
    return schedule


@pytest.mark.promise("each state is killed and restarted")
def test_thousands_of_long_schedules_lose_and_double_nothing() -> None:
    worlds = [play(Rules(), seeded(seed)) for seed in range(2000)]
    # They are worth something only if they get far: tables are handed over amid changes, with crashes and without.
    both = {Actor.APPLY, Actor.TABLE_SYNC}
    amid = [world for world in worlds if any(set(copy.by.values()) == both for copy in world.copies.values())]
    assert sum(world.crashed for world in amid) > 100
    assert sum(not world.crashed for world in amid) > 100


# Decisions of the apply worker, each broken in one way.


class OwnsOnlyPast(ApplyHandOff):
    """`>` instead of `>=`: a commit record that begins where the hand-off ended is written by neither worker."""

    def owned_from(self, state: TableState | None) -> EndLsn | None:
        owned = super().owned_from(state)
        return EndLsn(owned.value + 1) if owned is not None and owned.value else owned


class ReadyBeforeConfirmed(ApplyHandOff):
    def _has_reached(self, state: TableState) -> bool:
        return True


class ReadyBeforeRecorded(ApplyHandOff):
    """What was confirmed while idle may be forgotten by the server; Ready has forgotten where the hand-off was."""

    def take_over(self, states: States) -> TakeOver:
        return replace(super().take_over(states), record=None)


class CatchupAtTheConfirmedPosition(ApplyHandOff):
    """A batch that is being written lies past it, and the table's changes were left out of that."""

    def answer(self) -> TableState:
        return catchup(self.positions.confirmed)


class GoesOnDuringCatchup(ApplyHandOff):
    def may_begin(self, states: States) -> bool:
        return self._batch is None


class ReadsOnDuringCatchup(ApplyHandOff):
    """What follows a batch is sealed without the changes of a table that is handed over before where that ends."""

    def may_extend(self, states: States) -> bool:
        return self._batch is not None


class AnswersOnAnOldStream(ApplyHandOff):
    """The server's session does not send the changes of a partition that is published in another way since it began."""

    def may_answer(self, stream_needed_from: EndLsn) -> MayAnswer:
        return MayAnswer.YES


class AnswersWithoutARecord(ApplyHandOff):
    """The next run begins its stream where progress is on record, which is before what the table needs."""

    def to_record_before_answering(self, stream_needed_from: EndLsn) -> EndLsn | None:
        return None


class ConfirmsBeforeWriting(ApplyHandOff):
    def to_record(self) -> EndLsn | None:
        return self._batch

    def to_confirm(self) -> EndLsn | None:
        return self._batch

    def written(self) -> None:
        pass


class RecordsBeforeWriting(ApplyHandOff):
    """Recorded only: the next run begins there."""

    def to_record(self) -> EndLsn | None:
        return self._batch


class RecordsPastAFailedBatch(ApplyHandOff):
    def may_begin_last(self, states: States) -> bool:
        return self.may_begin(states)


# Decisions of a table sync worker.


class SyncDoneAtTheCopysPosition(TableSyncHandOff):
    def __init__(self, tables: Collection[TableId], positions: Positions) -> None:
        super().__init__(tables, positions)
        self.start = positions.began

    def to_hand_over(self, states: States, target: EndLsn) -> Mapping[TableId, TableState]:
        return dict.fromkeys(super().to_hand_over(states, target), sync_done(self.start))


class SyncDoneAtTheAskedPosition(TableSyncHandOff):
    def to_hand_over(self, states: States, target: EndLsn) -> Mapping[TableId, TableState]:
        answered = self.answered(states)
        assert answered is not None
        return dict.fromkeys(super().to_hand_over(states, target), sync_done(answered))


class SyncDoneBeforeCatchingUp(TableSyncHandOff):
    def to_hand_over(self, states: States, target: EndLsn) -> Mapping[TableId, TableState]:
        return super().to_hand_over(states, self.positions.sealed)


class SyncDoneBehindWhatIsWritten(TableSyncHandOff):
    """After a lost connection a worker is behind what it has written: handed over there, it would come from both."""

    def target(self, states: States) -> EndLsn | None:
        return self.answered(states)


class HandsOverWithChangesDeferred(TableSyncHandOff):
    """What a group's worker deferred for a table, while others were handed over, is not in what it hands over then."""

    def to_write(self) -> set[TableId]:
        return set() if self.asked else super().to_write()

    def to_hand_over(self, states: States, target: EndLsn) -> Mapping[TableId, TableState]:
        self.deferred.clear()
        return super().to_hand_over(states, target)


class KeepsWhatWasHandedOver(TableSyncHandOff):
    """A group's worker reads on for its other tables, and must not write for those that it has handed over."""

    def handed_over(self, tables: Collection[TableId]) -> None:
        self.asked.difference_update(tables)


class ConfirmsWithChangesDeferred(TableSyncHandOff):
    """A lost connection then loses what was deferred: the slot does not send it again."""

    def to_confirm(self) -> EndLsn | None:
        return self.positions.sealed


class KeepsItsPositionWithoutItsConnection(TableSyncHandOff):
    """Deferred changes are gone with the connection, and are not asked for again."""

    def lost_connection(self) -> None:
        self.deferred.clear()


def goes_on_after_a_crash_in_finished_copy(state: TableState) -> TableState:
    """As if the copy were the hand-off: its worker had written changes past it."""
    return sync_done(EndLsn(0)) if state == FINISHED_COPY else after_crash(state)


def starts_where_the_server_is(confirmed: EndLsn | None, recorded: EndLsn | None) -> EndLsn | None:
    """Without the store's progress: the server may have kept an older position than the hand-off's."""
    return confirmed


BROKEN = {
    **{
        broken.__name__: Rules(apply=broken)
        for broken in (
            OwnsOnlyPast,
            ReadyBeforeConfirmed,
            ReadyBeforeRecorded,
            CatchupAtTheConfirmedPosition,
            GoesOnDuringCatchup,
            ReadsOnDuringCatchup,
            AnswersOnAnOldStream,
            AnswersWithoutARecord,
            ConfirmsBeforeWriting,
            RecordsBeforeWriting,
            RecordsPastAFailedBatch,
        )
    },
    **{
        broken.__name__: Rules(sync=broken)
        for broken in (
            SyncDoneAtTheCopysPosition,
            SyncDoneAtTheAskedPosition,
            SyncDoneBeforeCatchingUp,
            SyncDoneBehindWhatIsWritten,
            HandsOverWithChangesDeferred,
            KeepsWhatWasHandedOver,
            ConfirmsWithChangesDeferred,
            KeepsItsPositionWithoutItsConnection,
        )
    },
    "ConfirmsIdleWithChangesWaiting": Rules(idle_with_changes_waiting=True),
    "GoesOnAfterACrashInFinishedCopy": Rules(after_crash=goes_on_after_a_crash_in_finished_copy),
    "StartsWhereTheServerIs": Rules(start=starts_where_the_server_is),
}


@pytest.mark.invariant(3)
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_caught(broken: Rules) -> None:
    """By its effect, or by a transition that the table of states does not have."""
    with pytest.raises((Violation, StateError)):
        play_many(broken)


def play_many(rules: Rules) -> None:
    for seed in range(3000):
        play(rules, seeded(seed))


def test_a_worker_that_is_far_away_asks_only_if_it_does_not_come_nearer() -> None:
    """All other tables wait until it has written everything up to where the apply worker is."""
    far = 10 << 30
    nearing = TableSyncHandOff([TABLES[0]], Positions.at(EndLsn(1)))
    distances = [int(far * 0.97**look) for look in range(300)]
    asks = next(distance for distance in distances if nearing.may_ask(distance, gaining=True))
    assert asks < FAR_BYTES
    stuck = TableSyncHandOff([TABLES[0]], Positions.at(EndLsn(1)))
    looks = next(look for look in range(1000) if stuck.may_ask(far, gaining=True))
    assert looks >= LOOKS_WITHOUT_COMING_NEARER


def test_a_table_that_waits_for_a_value_does_not_ask_as_the_next_of_a_group() -> None:
    hand_off = TableSyncHandOff([TABLES[0]], Positions.at(EndLsn(1)))
    hand_off.deferring([TABLES[0]])
    hand_off.wrote(EndLsn(5), [TABLES[0]], reads_on_until=EndLsn(9))
    assert not hand_off.may_ask_next(1)
    hand_off.wrote(EndLsn(9), [TABLES[0]])
    assert hand_off.may_ask_next(1)
