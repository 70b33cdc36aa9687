"""The apply worker's batch at the destination: one at a time, tried again after a failure, perhaps read on for values.

The destination works while the worker reads on and fills the next batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.config.pipeline import PipelineConfig
from headwater.contracts.results import PendingResult
from headwater.engine.destination_calls import DestinationCalls
from headwater.engine.follow.read_on import may_read_on, reads_until
from headwater.engine.retry import Attempts, raise_if_not_the_tables_own, waits
from headwater.engine.run_guard import RunGuard
from headwater.engine.table_states import TableStates
from headwater.engine.wake_up import WakeUp
from headwater.errors import HeadwaterError, Retry, passes
from headwater.events import EventBatch, SourceRead
from headwater.lsn import EndLsn
from headwater.schema.table import TableId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    batch: EventBatch
    seconds: float
    table_errors: Mapping[TableId, HeadwaterError]
    """Tables of which nothing was written."""


@dataclass(slots=True)
class _Write:
    batch: EventBatch
    pending: PendingResult
    started: float = field(default_factory=time.monotonic)
    again_at: float | None = None
    """When the next attempt is made, after one that failed."""
    reads_on_until: EndLsn | None = None
    """It waits for what was committed until there (see `read_on`)."""
    read_on: int = 0
    """How often that was done for it."""
    may_read_on: bool = True


class BatchWriter:
    """Used by the apply worker's thread."""

    def __init__(
        self,
        config: PipelineConfig,
        calls: DestinationCalls,
        table_states: TableStates,
        guard: RunGuard,
        wake_up: WakeUp,
    ) -> None:
        self._config = config
        self._calls = calls
        self._table_states = table_states
        self._guard = guard
        self._wake_up = wake_up
        self._attempts = Attempts("writing a batch", guard.progress)
        self._write: _Write | None = None

    @property
    def is_busy(self) -> bool:
        return self._write is not None

    def begin(self, batch: EventBatch, *, read_on: int = 0) -> None:
        self._guard.require_lock()
        self._write = _Write(batch, self._calls.write_events("headwater-write", batch), read_on=read_on)
        self._write.pending.on_done(self._wake_up.notify)

    def finish(self) -> WrittenBatch | None:
        """The batch, once the destination has made it durable; after that another one may begin."""
        write = self._write
        if write is None or not write.pending.done or write.reads_on_until is not None:
            return None
        if write.again_at is not None:
            if time.monotonic() >= write.again_at:
                self.begin(write.batch, read_on=write.read_on)
            return None
        for table, count in write.pending.missed.items():
            self._guard.progress.missed(table, count)
        try:
            write.pending.raise_if_failed()
            raise_if_not_the_tables_own(write.batch, write.pending.table_errors)
        except HeadwaterError as error:
            self._try_again(write, error)
            return None
        if self._reads_on(write):
            return None
        self._write = None
        self._attempts.succeeded()
        return WrittenBatch(write.batch, time.monotonic() - write.started, write.pending.table_errors)

    def _try_again(self, write: _Write, error: HeadwaterError) -> None:
        """Reading goes on meanwhile as far as there is room, so that the lag is known."""
        limit = self._config.table_error_retry_max_attempts
        if not waits(error) and self._attempts.failures >= limit:
            error = error.with_retry(Retry.NEVER)  # the budget is used up: a new connection would only begin another
        if not passes(error):
            self._write = None
            self._attempts.forget()
            raise error
        write.again_at = time.monotonic() + self._attempts.failed(error)

    @property
    def is_to_be_tried_again(self) -> bool:
        return self._write is not None and self._write.again_at is not None

    def drop(self) -> None:
        self._write = None

    # Reading on

    def _reads_on(self, write: _Write) -> bool:
        """Whether tables wait for what follows the batch in the stream.

        Nothing of the batch is recorded meanwhile. What is durable of it is recognised when it comes again with what follows.
        """
        reads = write.pending.reads
        if not reads or not write.may_read_on or not may_read_on(write.batch, write.read_on, self._config.batch):
            return False
        write.reads_on_until = reads_until(reads)
        names = ", ".join(str(self._table_states.name(table)) for table in reads)
        log.info("reading on to %s for values of %s that were not sent", write.reads_on_until, names)
        return True

    @property
    def reads_on_until(self) -> EndLsn | None:
        return self._write.reads_on_until if self._write is not None else None

    @property
    def waiting(self) -> tuple[EventBatch, Mapping[TableId, SourceRead]]:
        """The batch that waits for what follows it, and what was read for it."""
        assert self._write is not None
        return self._write.batch, self._write.pending.reads

    def goes_on_with(self, batch: EventBatch) -> None:
        """The batch that waited, with what followed it."""
        assert self._write is not None
        self.begin(batch, read_on=self._write.read_on + 1)

    def stops_reading_on(self) -> None:
        """Too much would have to be read: the errors of the tables that wait count."""
        assert self._write is not None
        self._write.reads_on_until, self._write.may_read_on = None, False
        self._wake_up.notify()
