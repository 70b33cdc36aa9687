"""Whether a worker may go on: the stop that it listens to, and the lock of the run (invariant 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from headwater.engine.retry import retrying
from headwater.engine.run_lock import RunLock
from headwater.engine.stop import Stop
from headwater.errors import HeadwaterError, ShutdownRequested, passes
from headwater.observability.progress import Progress

T = TypeVar("T")


@dataclass(frozen=True)
class RunGuard:
    lock: RunLock
    progress: Progress
    stop: Stop = field(default_factory=Stop)

    def part(self) -> RunGuard:
        """For a worker that can be stopped by itself; it stops with the run too."""
        return replace(self, stop=self.stop.part())

    def require_lock(self) -> None:
        """Before each write, record, confirmed position and slot made or dropped: see `RunLock`."""
        self.lock.require(self.stop)

    def raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise ShutdownRequested("the pipeline is stopping", hint="Start the pipeline again to go on.")

    def pause(self, seconds: float) -> None:
        """Wait between attempts; a stop ends the wait at once."""
        self.stop.wait(seconds)
        self.raise_if_stopped()

    def retrying(
        self,
        doing: str,
        work: Callable[[], T],
        *,
        again: Callable[[HeadwaterError], bool] = passes,
        pause: Callable[[float], None] | None = None,
    ) -> T:
        """Do the work until it succeeds; see `retry.retrying`."""
        return retrying(doing, work, progress=self.progress, pause=pause or self.pause, again=again)
