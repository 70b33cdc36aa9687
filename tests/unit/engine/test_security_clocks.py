"""A wall clock that is set, by a time server or because a machine was suspended, moves no retry of a table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from headwater.config import PgConnectionConfig, PipelineConfig
from headwater.engine.retry_times import RetryTimes, table_backoff
from headwater.errors import DestinationError, Retry
from headwater.schema.table import TableId
from headwater.states import TableState, errored

TABLE = TableId(7)
NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)
DAY = timedelta(days=1)
DELAY_SECONDS = 10.0
CONFIG = PipelineConfig(
    id=1,
    publication_name="shop",
    pg_connection=PgConnectionConfig(host="db", name="shop", username="me"),
    table_error_retry_delay_ms=round(DELAY_SECONDS * 1000),
)


class Clocks:
    """Time passes on both; `set` is what a time server does."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.wall = NOON

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds
        self.wall += timedelta(seconds=seconds)

    def times(self) -> RetryTimes:
        return RetryTimes(CONFIG, lambda: self.seconds, lambda: self.wall)


def failed(at: datetime, seconds: float, attempts: int = 1) -> TableState:
    return errored(DestinationError("no"), attempts=attempts, next_retry=at + timedelta(seconds=seconds))


@pytest.mark.parametrize("step", [-365 * DAY, -DAY, DAY, 365 * DAY])
def test_a_clock_that_is_set_while_a_table_waits_changes_nothing(step: timedelta) -> None:
    clocks = Clocks()
    times, state = clocks.times(), failed(NOON, 8)
    assert not times.is_due(TABLE, state)
    clocks.wall += step
    clocks.pass_by(7.9)
    assert not times.is_due(TABLE, state)
    clocks.pass_by(0.2)
    assert times.is_due(TABLE, state)


@pytest.mark.parametrize(("attempts", "longest"), [(1, 10.0), (3, 40.0), (30, 3600.0)])
def test_after_a_start_with_a_clock_that_was_set_back_the_wait_is_at_most_the_policys_own(
    attempts: int, longest: float
) -> None:
    clocks = Clocks()
    state = failed(NOON, 8, attempts)
    clocks.wall -= DAY
    times = clocks.times()
    assert not times.is_due(TABLE, state)
    clocks.pass_by(longest - 0.1)
    assert not times.is_due(TABLE, state)
    clocks.pass_by(0.2)
    assert times.is_due(TABLE, state)
    assert table_backoff(CONFIG, attempts).longest_seconds == longest


def test_a_later_failure_has_a_wait_of_its_own() -> None:
    clocks = Clocks()
    times = clocks.times()
    assert not times.is_due(TABLE, failed(NOON, 5))
    clocks.pass_by(6)
    assert times.is_due(TABLE, failed(NOON, 5))
    again = failed(clocks.wall, 15, attempts=2)
    assert not times.is_due(TABLE, again)
    clocks.pass_by(15.1)
    assert times.is_due(TABLE, again)


def test_a_time_that_has_passed_is_due_at_once_and_what_waits_for_a_person_never_is() -> None:
    clocks = Clocks()
    times = clocks.times()
    assert times.is_due(TABLE, failed(NOON - DAY, 0))
    assert not times.is_due(TableId(8), errored(DestinationError("no", retry=Retry.MANUAL)))
