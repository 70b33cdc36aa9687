"""The handle a destination completes to say that what it was given is durable.

A handle is completed once, from any thread. One that nobody refers to any more without having been completed fails by
itself: a destination that forgot it is a destination error, not a pipeline that waits for ever.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from headwater.errors import DestinationError, HeadwaterError, ShutdownRequested


class _Outcome:
    """What the engine waits on; outlives the handle so that dropping the handle can be seen."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._done = False
        self._error: HeadwaterError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def complete(self, error: HeadwaterError | None) -> bool:
        with self._condition:
            if self._done:
                return False
            self._done, self._error = True, error
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

    def wait(self, timeout_seconds: float | None = None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._done, timeout_seconds)


def _dropped(outcome: _Outcome, what: str) -> None:
    outcome.complete(
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
        self._outcome = _Outcome()
        self._finalizer = weakref.finalize(self, _dropped, self._outcome, self.what)
        self._finalizer.atexit = False

    def done(self) -> None:
        """Everything of this call is durable. A second completion is ignored."""
        self._outcome.complete(None)

    def failed(self, error: Exception) -> None:
        """Nothing may be taken as durable; the engine decides by `error.retry` what comes next."""
        if not isinstance(error, HeadwaterError):
            error = DestinationError(
                f"the destination failed in {self.what}",
                detail=f"{type(error).__name__}: {error}",
                hint="Look at the destination's own log; the batch is tried again.",
            )
        self._outcome.complete(error)


class DropTableForCopyResult(Result):
    what = "drop_table_for_copy"


class WriteTableRowsResult(Result):
    what = "write_table_rows"


class WriteEventsResult(Result):
    what = "write_events"


class PendingResult:
    """The engine's side of a handle."""

    def __init__(self, result: Result) -> None:
        self._outcome = result._outcome

    @property
    def done(self) -> bool:
        return self._outcome.done

    def on_done(self, callback: Callable[[], None]) -> None:
        self._outcome.on_done(callback)

    def raise_if_failed(self) -> None:
        if self._outcome.error is not None:
            raise self._outcome.error

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until completed, whatever the outcome; False if the time was not enough."""
        return self._outcome.wait(timeout_seconds)

    def wait(self, stop: threading.Event | None = None) -> None:
        """Wait until completed; raise its error, or ShutdownRequested once `stop` is set."""
        while not self._outcome.wait(0.2 if stop is not None else None):
            if stop is not None and stop.is_set():
                raise ShutdownRequested("stopped while waiting for the destination", hint="Start the pipeline again.")
        self.raise_if_failed()
