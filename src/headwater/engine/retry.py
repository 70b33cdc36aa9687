"""Retries: how long to wait between attempts, what is logged, and the one loop that does it.

Which errors pass with time is `headwater.errors.meaning`. A wait is told in the log once an attempt, with pauses that grow,
and once more when it is over; while it lasts, `Progress.waiting` shows it with its root cause.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from headwater.errors import DestinationError, HeadwaterError, Meaning, Retry, meaning, passes
from headwater.events import EventBatch
from headwater.limits import naming_limits
from headwater.observability.progress import Progress
from headwater.schema.table import TableId

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_SECONDS = 0.5
MOST_SECONDS = 30.0


class Backoff:
    """Exponential, with jitter, reset by progress."""

    def __init__(self, first_seconds: float | None = None, most_seconds: float | None = None) -> None:
        self._first = FIRST_SECONDS if first_seconds is None else first_seconds
        self._most = MOST_SECONDS if most_seconds is None else most_seconds
        self.attempts = 0

    def next_seconds(self) -> float:
        """Count an attempt and say how long to wait after it: doubled each time, and between half and all of that."""
        wait = self.longest_seconds
        self.attempts += 1
        return wait * random.uniform(0.5, 1.0)

    @property
    def longest_seconds(self) -> float:
        """What `next_seconds` says at most."""
        return min(self._most, self._first * 2.0 ** min(self.attempts, 32))

    def reset(self) -> None:
        self.attempts = 0


class Attempts:
    """Attempts at one thing, by one thread. `doing` completes "... failed" and "... succeeded"."""

    def __init__(self, doing: str, progress: Progress) -> None:
        self._doing = doing
        self._progress = progress
        self._backoff = Backoff()
        self._since = 0.0

    @property
    def failures(self) -> int:
        """In a row."""
        return self._backoff.attempts

    def failed(self, error: HeadwaterError) -> float:
        """Tell it, and say how long to wait before the next attempt."""
        if not self.failures:
            self._since = time.monotonic()
        seconds = self._backoff.next_seconds()
        log.warning("%s failed, retrying in %.1f s: %s", self._doing, seconds, error.summary)
        self._progress.waiting(f"{self._doing} failed: {error.summary}", self)
        return seconds

    def resumed(self) -> None:
        """Another attempt has begun well, and nothing is known of how it ends: no longer shown as waiting. The next pause grows
        on all the same, until `succeeded`."""
        self._progress.waiting(None, self)

    def succeeded(self) -> None:
        if self.failures:
            lasted = time.monotonic() - self._since
            log.warning("%s succeeded after %d failed attempts in %.0f s", self._doing, self.failures, lasted)
            self.forget()

    def forget(self) -> None:
        """Without a log line: the attempts are given up, or a new count begins."""
        self._backoff.reset()
        self._progress.waiting(None, self)


def retrying(
    doing: str,
    work: Callable[[], T],
    *,
    progress: Progress,
    pause: Callable[[float], None],
    again: Callable[[HeadwaterError], bool] = passes,
) -> T:
    """Do the work until it succeeds; an error that `again` does not take is raised. `pause` raises to end it."""
    attempts = Attempts(doing, progress)
    try:
        while True:
            try:
                with naming_limits(doing):
                    done = work()
            except HeadwaterError as error:
                if not again(error):
                    raise
                pause(attempts.failed(error))
            else:
                attempts.succeeded()
                return done
    finally:
        attempts.forget()


def waits(error: HeadwaterError) -> bool:
    """Whether infrastructure is unreachable, and nothing else is wrong."""
    return meaning(error) is Meaning.WAIT


def raise_if_not_the_tables_own(batch: EventBatch, errors: Mapping[TableId, HeadwaterError]) -> None:
    """Errors that a destination gave to single tables: raise where the whole batch must be taken as failed."""
    for table, error in errors.items():
        if meaning(error) in (Meaning.WAIT, Meaning.FATAL):
            raise error
        if table not in batch.tables:
            raise DestinationError(
                f"the destination failed table {table}, which was not in the batch",
                detail=f"it said: {error.message}",
                hint="Name only tables of events.tables in result.failed_tables.",
                retry=Retry.NEVER,
            )
