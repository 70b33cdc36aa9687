"""The user's permission to replace another owner's rows is kept with the table until its copy is finished, and no longer."""

from __future__ import annotations

from dataclasses import replace

from headwater.errors import DestinationError
from headwater.lsn import EndLsn
from headwater.states import (
    DATA_SYNC,
    FINISHED_COPY,
    INIT,
    carried,
    errored,
    state_from_json,
    state_to_json,
    sync_done,
)

ASKED = replace(INIT, take_over=True)


def test_leave_to_take_over_is_recorded_and_tells_states_apart() -> None:
    assert state_from_json(state_to_json(ASKED)) == ASKED
    assert state_from_json({"phase": "init"}) == INIT
    assert ASKED != INIT


def test_leave_to_take_over_lasts_until_the_copy_is_finished_through_errors_and_new_attempts() -> None:
    copying = carried(ASKED, DATA_SYNC)
    failed = carried(copying, errored(DestinationError("no")))
    again = carried(failed, INIT)
    assert copying.take_over
    assert failed.take_over
    assert again.take_over
    finished = carried(copying, FINISHED_COPY)
    assert not finished.take_over
    assert not carried(finished, sync_done(EndLsn(1))).take_over
