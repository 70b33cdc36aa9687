from __future__ import annotations

from datetime import UTC, datetime

import pytest

from headwater.errors import DestinationError, Retry, StateError
from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.states import (
    AFTER_CRASH,
    FINISHED_COPY,
    INIT,
    READY,
    SYNC_WAIT,
    TRANSITIONS,
    Actor,
    Phase,
    catchup,
    check_transition,
    errored,
    state_from_json,
    state_to_json,
    sync_done,
)

TABLE = TableId(1)


@pytest.mark.invariant(15)
def test_every_way_back_from_errored_leads_through_init() -> None:
    for (phase, _), targets in TRANSITIONS.items():
        if phase is Phase.ERRORED:
            assert targets == {Phase.INIT}


def test_ready_is_reached_only_from_sync_done_and_only_by_the_apply_worker() -> None:
    ways = [source for source, targets in TRANSITIONS.items() if Phase.READY in targets]
    assert ways == [(Phase.SYNC_DONE, Actor.APPLY)]


def test_the_phases_of_memory_are_not_persisted() -> None:
    assert not SYNC_WAIT.persisted
    assert not catchup(EndLsn(1)).persisted
    assert all(state.persisted for state in (INIT, FINISHED_COPY, READY, sync_done(EndLsn(1))))


def test_a_crash_before_the_hand_off_starts_the_copy_again_and_after_it_goes_on() -> None:
    assert {phase for phase, after in AFTER_CRASH.items() if after is Phase.INIT} == {
        Phase.INIT,
        Phase.DATA_SYNC,
        Phase.FINISHED_COPY,
        Phase.SYNC_WAIT,
        Phase.CATCHUP,
    }
    assert all(AFTER_CRASH[phase] is phase for phase in (Phase.SYNC_DONE, Phase.READY, Phase.ERRORED))


def test_a_transition_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(StateError, match="cannot go from init to ready"):
        check_transition(TABLE, INIT, READY, Actor.APPLY)
    with pytest.raises(StateError):
        check_transition(TABLE, SYNC_WAIT, catchup(EndLsn(1)), Actor.TABLE_SYNC)
    check_transition(TABLE, SYNC_WAIT, catchup(EndLsn(1)), Actor.APPLY)


@pytest.mark.promise("errored tables keep their policy across restarts")
@pytest.mark.parametrize(
    "state",
    [
        INIT,
        READY,
        sync_done(EndLsn(2**40 + 5)),
        errored(DestinationError("no", detail="why", hint="do", retry=Retry.MANUAL)),
        errored(DestinationError("no"), attempts=3, next_retry=datetime(2026, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_state_survives_its_json(state: object) -> None:
    assert state_from_json(state_to_json(state)) == state  # type: ignore[arg-type]
