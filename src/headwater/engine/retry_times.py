"""When an errored table is tried again: at the time on record, but never later than its policy would have it wait from now.

The record holds a wall time, because it outlives the process. A wall clock may be set: stepped back by a day, it would put the
attempt off by a day. So what is left to wait is worked out once, when a run first sees the error; it is at most the delay that
the settings ask for, and is then counted on a clock that cannot be set.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from headwater.config.pipeline import PipelineConfig
from headwater.engine.retry import Backoff
from headwater.errors import Retry
from headwater.schema.table import TableId
from headwater.states import RetryPolicy, TableState

_MOST_SECONDS = 3600.0


def table_backoff(config: PipelineConfig, attempts: int) -> Backoff:
    """The pauses of a table that has failed so often."""
    backoff = Backoff(config.table_error_retry_delay_ms / 1000, most_seconds=_MOST_SECONDS)
    backoff.attempts = max(0, attempts - 1)
    return backoff


def _wall_time() -> datetime:
    return datetime.now(UTC)


class RetryTimes:
    """Of one run. Used by one thread."""

    def __init__(
        self,
        config: PipelineConfig,
        clock: Callable[[], float] = time.monotonic,
        wall_time: Callable[[], datetime] = _wall_time,
    ) -> None:
        self._config = config
        self._clock = clock
        self._wall_time = wall_time
        self._due: dict[TableId, tuple[RetryPolicy, float]] = {}

    def is_due(self, table_id: TableId, state: TableState) -> bool:
        policy = state.retry_policy
        if policy is None or policy.kind is not Retry.TIMED or policy.next_retry is None:
            return False
        seen = self._due.get(table_id)
        if seen is None or seen[0] != policy:
            left = (policy.next_retry - self._wall_time()).total_seconds()
            longest = table_backoff(self._config, policy.attempts).longest_seconds
            seen = self._due[table_id] = (policy, self._clock() + min(max(left, 0.0), longest))
        return self._clock() >= seen[1]
