"""The handle a destination completes to say that what it was given is durable.

A handle is completed once, from any thread. If it is garbage collected before that, it fails: a destination that forgot it
causes a destination error, and not a pipeline that waits for ever. Where a deadline is set, a handle that is not completed in
time fails too, and a later completion is ignored.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping

from headwater.errors import DestinationError, HeadwaterError, Retry, ShutdownRequested, said_by
from headwater.events import SourceRead
from headwater.limits import limit_reached
from headwater.schema.table import TableId

_LOOK_SECONDS = 0.2


class _Completion:
    """What the engine waits on; outlives the handle so that dropping the handle can be seen."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._done = False
        self._error: HeadwaterError | None = None
        self._table_errors: Mapping[TableId, HeadwaterError] = {}
        self.missed: Mapping[TableId, int] = {}
        self.reads: Mapping[TableId, SourceRead] = {}
        self._callbacks: list[Callable[[], None]] = []

    def complete(
        self, error: HeadwaterError | None, table_errors: Mapping[TableId, HeadwaterError] | None = None
    ) -> bool:
        with self._condition:
            if self._done:
                return False
            self._done, self._error, self._table_errors = True, error, table_errors or {}
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            callback()
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        with self._condition:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    @property
    def done(self) -> bool:
        with self._condition:
            return self._done

    @property
    def error(self) -> HeadwaterError | None:
        with self._condition:
            return self._error

    @property
    def table_errors(self) -> Mapping[TableId, HeadwaterError]:
        with self._condition:
            return self._table_errors

    def wait(self, timeout_seconds: float | None = None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._done, timeout_seconds)


def _dropped(completion: _Completion, what: str) -> None:
    completion.complete(
        DestinationError(
            f"the destination dropped the result of {what}",
            detail="the result handle was garbage collected before it was completed",
            hint="Call result.done() or result.failed(error) on every path of the method.",
        )
    )


class Result:
    """Given to a destination with each call. Call `done()` or `failed(error)` exactly once."""

    what = "a call"

    def __init__(self) -> None:
        self._completion = _Completion()
        self._finalizer = weakref.finalize(self, _dropped, self._completion, self.what)
        self._finalizer.atexit = False

    def done(self) -> None:
        """Everything of this call is durable. A second completion is ignored."""
        self._completion.complete(None)

    def failed(self, error: Exception) -> None:
        """Nothing of this call counts as durable; the engine decides by the error and its `retry` what comes next."""
        self._completion.complete(self._explained(error))

    def _explained(self, error: Exception) -> HeadwaterError:
        if isinstance(error, HeadwaterError):
            return error
        if (limit := limit_reached(error, f"the destination was in {self.what}")) is not None:
            return limit
        return DestinationError(
            f"the destination failed in {self.what}",
            detail=said_by(error),
            hint="See the destination's own log; the batch is retried.",
        )


class DropTableForCopyResult(Result):
    what = "drop_table_for_copy"


class WriteTableRowsResult(Result):
    what = "write_table_rows"


class WriteEventsResult(Result):
    what = "write_events"

    def missed(self, changes: Mapping[TableId, int]) -> None:
        """How many updates and deletes of a table found no row (invariant 18). To be called, if at all, before completion."""
        self._completion.missed = dict(changes)

    def reads_on(self, reads: Mapping[TableId, SourceRead]) -> None:
        """These tables, which `failed_tables` names as well, need the stream up to the position of the read.

        What was read in the source is newer than the batch, and the row may have been changed, deleted or replaced by another
        in between. It is the right row if the transaction that wrote it is the last one in the batch that changed it; or if
        the batch holds all until the read's position, and the read has seen the transaction that gave the row its key. If
        neither is so, call this: the batch comes again together with the transactions after it and with the read
        (`EventBatch.reads`), or, where too many followed, the table's error counts.
        """
        self._completion.reads = dict(reads)

    def failed_tables(self, errors: Mapping[TableId, Exception]) -> None:
        """The named tables failed, everything else of this call is durable.

        For errors of single tables: each of these tables is recorded as errored, with its error's `retry`, and comes back
        through a new copy; the others continue. With an error that means that the destination is unreachable, no table is
        marked failed, and the whole batch is retried.
        """
        self._completion.complete(None, {table: self._explained(error) for table, error in errors.items()})


class PendingResult:
    """The engine's side of a handle."""

    def __init__(self, result: Result, deadline_seconds: float | None = None) -> None:
        self._completion = result._completion
        self._what = result.what
        self._deadline_seconds = deadline_seconds
        self._started = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether it is completed, by the destination or by its deadline."""
        self._look_at_deadline()
        return self._completion.done

    @property
    def table_errors(self) -> Mapping[TableId, HeadwaterError]:
        """The tables that failed on their own, where the rest is durable."""
        return self._completion.table_errors

    @property
    def missed(self) -> Mapping[TableId, int]:
        """Updates and deletes that found no row, by table; complete once it is done."""
        return self._completion.missed

    @property
    def reads(self) -> Mapping[TableId, SourceRead]:
        """The tables that wait for more of the stream, with what was read for them."""
        return self._completion.reads

    def on_done(self, callback: Callable[[], None]) -> None:
        self._completion.on_done(callback)

    def raise_if_failed(self) -> None:
        if self._completion.error is not None:
            raise self._completion.error

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until completed, whatever the outcome; False if the time was not enough."""
        return self._completion.wait(timeout_seconds)

    def wait(self, stop: threading.Event | None = None) -> None:
        """Wait until completed; raise its error, or ShutdownRequested once `stop` is set."""
        watched = stop is not None or self._deadline_seconds is not None
        while not self._completion.wait(_LOOK_SECONDS if watched else None):
            self._look_at_deadline()
            if stop is not None and stop.is_set():
                raise ShutdownRequested("stopped while waiting for the destination", hint="Start the pipeline again.")
        self.raise_if_failed()

    def _look_at_deadline(self) -> None:
        """Fail the handle if its deadline has passed.

        Not retried automatically: the destination may still be writing, and there is one call for a table at a time.
        """
        limit = self._deadline_seconds
        if limit is None or time.monotonic() - self._started < limit or self._completion.done:
            return
        self._completion.complete(
            DestinationError(
                f"the destination missed the deadline of {self._what}",
                detail=f"the result was not completed within {limit:g} s; it is unknown whether anything was written",
                hint="Find out what the destination waits for, or raise destination_deadline_ms; then start the pipeline again.",
                retry=Retry.MANUAL,
            )
        )
