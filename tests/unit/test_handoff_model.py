"""No interleaving of the workers, and no crash, loses or doubles a change; and this test would see one that does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.lsn import ZERO, CommitLsn, EndLsn
from headwater.states import FINISHED_COPY, Actor, TableState, sync_done
from tests.unit.handoff_model import ACTIONS, CRASHES, TABLES, TROUBLE, Rules, Sync, Violation, World, play

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
    trouble = choose.choice((0.0, 0.05, 0.3))
    weights = [trouble if name in TROUBLE else speeds[name.split("_")[0]] for name in ACTIONS]
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


class OwnsOnlyPast(Rules):
    """`>` instead of `>=`: a commit record that begins where the hand-off ended belongs to nobody."""

    def owns(self, commit: CommitLsn, from_lsn: EndLsn) -> bool:
        return commit.value > from_lsn.value


class ReadyBeforeConfirmed(Rules):
    def may_be_ready(self, world: World, lsn: EndLsn) -> bool:
        return True


class ReadyBeforeRecorded(Rules):
    """What was confirmed while idle may be forgotten by the server; Ready has forgotten where the hand-off was."""

    records_before_ready = False


class SyncDoneAtTheCopysPosition(Rules):
    def done_at(self, sync: Sync, asked: EndLsn) -> EndLsn:
        return sync.start


class SyncDoneAtTheAskedPosition(Rules):
    def done_at(self, sync: Sync, asked: EndLsn) -> EndLsn:
        return asked


class SyncDoneBeforeCatchingUp(Rules):
    def may_finish(self, sync: Sync, asked: EndLsn) -> bool:
        return True


class SyncDoneBehindWhatIsWritten(Rules):
    """After a lost connection a worker is behind what it has written: handed over there, it would come from both."""

    def may_finish(self, sync: Sync, asked: EndLsn) -> bool:
        return sync.position >= asked


class CatchupAtTheConfirmedPosition(Rules):
    """A batch that is being written lies past it, and the table's changes were left out of that."""

    def catchup_at(self, world: World) -> EndLsn:
        return world.confirmed


class GoesOnDuringCatchup(Rules):
    pauses_during_catchup = False


class ConfirmsBeforeWriting(Rules):
    confirms_early = True


class ConfirmsIdleWithChangesWaiting(Rules):
    confirms_idle_with_changes_waiting = True


class RecordsPastAFailedBatch(Rules):
    goes_on_past_a_failure = True


class StartsWhereTheServerIs(Rules):
    """Without the store's progress: the server may have kept an older position than the hand-off's."""

    def start(self, world: World) -> EndLsn:
        return world.server_confirmed


class HandsOverWithChangesPutOff(Rules):
    """What a group's worker put off for a table, while others were handed over, is not in what it hands over then."""

    writes_what_was_put_off = False


class KeepsWhatWasHandedOver(Rules):
    """A group's worker reads on for its other tables, and must not write for those that are out of its hands."""

    lets_go_of_what_was_handed_over = False


class ConfirmsWithChangesPutOff(Rules):
    """A lost connection then loses what was put off: the slot does not send it again."""

    confirms_with_changes_put_off = True


class GoesOnAfterACrashInFinishedCopy(Rules):
    """As if the copy were the hand-off: its worker had written changes past it."""

    def after_crash(self, state: TableState) -> TableState:
        return sync_done(ZERO) if state == FINISHED_COPY else super().after_crash(state)


def play_until_caught(broken: type[Rules]) -> None:
    for seed in range(2000):
        play(broken(), seeded(seed))


@pytest.mark.promise("no change is lost or doubled, whoever is quicker")
@pytest.mark.invariant(3)
@pytest.mark.parametrize(
    "broken",
    [
        OwnsOnlyPast,
        ReadyBeforeConfirmed,
        ReadyBeforeRecorded,
        SyncDoneAtTheCopysPosition,
        SyncDoneAtTheAskedPosition,
        SyncDoneBeforeCatchingUp,
        SyncDoneBehindWhatIsWritten,
        CatchupAtTheConfirmedPosition,
        GoesOnDuringCatchup,
        ConfirmsBeforeWriting,
        ConfirmsIdleWithChangesWaiting,
        RecordsPastAFailedBatch,
        StartsWhereTheServerIs,
        HandsOverWithChangesPutOff,
        KeepsWhatWasHandedOver,
        ConfirmsWithChangesPutOff,
        GoesOnAfterACrashInFinishedCopy,
    ],
)
def test_a_broken_rule_is_caught(broken: type[Rules]) -> None:
    with pytest.raises(Violation):
        play_until_caught(broken)
