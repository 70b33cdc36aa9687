"""Waiting between attempts: exponential, with jitter, reset by progress."""

from __future__ import annotations

import random
from collections.abc import Mapping

from headwater.errors import (
    ConnectError,
    ConnectionLost,
    DestinationError,
    DestinationUnavailable,
    HeadwaterError,
    LakeCommitUnknown,
    Retry,
    SpoolError,
    StoreUnavailable,
)
from headwater.events import EventBatch
from headwater.schema.table import TableId

WORLD = (ConnectError, ConnectionLost, StoreUnavailable, DestinationUnavailable, LakeCommitUnknown, SpoolError)
"""Trouble that is nobody's in particular: waited out, never recorded as a table's error (invariant 15)."""


class Backoff:
    def __init__(self, first_seconds: float, most_seconds: float = 30.0) -> None:
        self._first, self._most = first_seconds, most_seconds
        self.attempts = 0

    def next_seconds(self) -> float:
        """Count an attempt and say how long to wait after it: doubled each time, and between half and all of that."""
        wait = min(self._most, self._first * 2.0**self.attempts)
        self.attempts += 1
        return wait * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.attempts = 0


def is_worth_retrying(error: HeadwaterError) -> bool:
    return isinstance(error, WORLD) or error.retry is Retry.TIMED


def raise_if_not_the_tables_own(batch: EventBatch, errors: Mapping[TableId, HeadwaterError]) -> None:
    """Errors that a destination gave to single tables: raise where the whole batch must be taken as failed."""
    for table, error in errors.items():
        if isinstance(error, WORLD):
            raise error
        if table not in batch.tables:
            raise DestinationError(
                f"the destination failed table {table}, which was not in the batch",
                detail=f"it said: {error.message}",
                hint="Name only tables of events.tables in result.failed_tables.",
                retry=Retry.NEVER,
            )
