"""The right to write, as the workers of a run rely on it: the pipeline's lock, and the run's token in the store.

A lock can be lost without the process noticing at once: its session was ended, or the process itself was stopped for a while.
So `require` stands before each write to the destination, each record, each position that is confirmed and each slot that is
made or dropped. It costs no round trip as long as the lock was verified a moment ago. Once another run has begun,
it raises, and nothing of this run is written any more (invariant 6).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable

from headwater.contracts.stores import PipelineStore
from headwater.engine.stop import Stop
from headwater.errors import HeadwaterError, PipelineLocked, ShutdownRequested, passes
from headwater.lsn import EndLsn
from headwater.source.lock import PipelineLock

log = logging.getLogger(__name__)

VERIFY_SECONDS = 1.0
"""How often the supervisor asks the server."""
_LOOK_SECONDS = 0.1
_FRESH_SECONDS = 5.0
"""How long an answer counts. A process that was stopped for longer asks before it does anything else."""
_BACK_SECONDS = 2.0
"""A lock whose session was ended is usually held again after one attempt."""


def _now() -> float:
    """Goes on while the process is stopped and while the machine is suspended, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class RunLock:
    """May be used from several threads."""

    def __init__(
        self,
        lock: PipelineLock,
        store: PipelineStore,
        token: str,
        clock: Callable[[], float] = _now,
        seen: Callable[[EndLsn], None] = lambda position: None,
    ) -> None:
        """`seen` is told how far the server's log is, each time that it is asked for the lock."""
        self._seen = seen
        self._lock = lock
        self._store = store
        self.token = token
        """Names the run."""
        self.attempts = itertools.count(1)
        """Numbers for whatever the run does several times and names each time: those of its slots."""
        self._clock = clock
        self._verifying = threading.Lock()
        self._begun = False
        self._held = False
        self._lost_at: float | None = None
        self._verified = 0.0
        self._tried = 0.0
        self._lost: PipelineLocked | None = None
        self._last_error = ""

    def acquire(self) -> None:
        """Before anything else of a run."""
        self._lock.acquire()
        self._held, self._verified = True, self._clock()

    def begin(self) -> None:
        """When the store is open and before anything is recorded; again when the run opens its slot again."""
        if self._begun:
            self._store.check_run()
            return
        self._store.begin_run(self.token)
        self._begun = True

    def release(self) -> None:
        self._held = False
        self._lock.release()

    @property
    def is_held(self) -> bool:
        """As far as is known; without a round trip, and whatever the age of that knowledge."""
        return self._held and self._lost is None

    def is_out_of_reach(self) -> bool:
        """Whether its session was ended and could not be opened again for seconds: nothing can be confirmed meanwhile.

        A server that is stopped in the fast way ends ordinary sessions, and then waits until those who follow a slot have
        confirmed what it sent. They cannot without the lock, so each would wait for the other for ever.
        """
        lost_at = self._lost_at
        return lost_at is not None and self._clock() - lost_at >= _BACK_SECONDS

    def require(self, stop: Stop) -> None:
        """Return only while the lock is held. Waits while it is being taken again, until `stop` is set.

        Raises PipelineLocked once another run has it, ShutdownRequested if the wait was ended.
        """
        while not self._is_fresh():
            if self._verify_with_others(stop):
                return
            if stop.wait(VERIFY_SECONDS):
                raise ShutdownRequested(
                    "the pipeline is stopping, and its lock is not held", hint="Start the pipeline again to go on."
                )

    def _is_fresh(self) -> bool:
        if self._lost is not None:
            raise self._lost
        return self._held and self._clock() - self._verified <= _FRESH_SECONDS

    def _verify_with_others(self, stop: Stop) -> bool:
        """What another thread learns while we wait for it is our answer too: asking a server that is silent takes seconds, and
        each of many workers would take them after the other."""
        came = self._clock()
        while not self._verifying.acquire(timeout=_LOOK_SECONDS):
            if stop.is_set() and self._clock() - came > _FRESH_SECONDS:
                return False
        try:
            return self._is_fresh() if self._tried > came else self._ask()
        finally:
            self._verifying.release()

    def verify(self) -> bool:
        """Ask the server; take the lock again if its session is gone. Raises PipelineLocked if another run has it.

        False if there was no answer: the lock counts as not held then, and is asked for again.
        """
        with self._verifying:
            return self._ask()

    def _ask(self) -> bool:
        if self._lost is not None:
            raise self._lost
        asked = self._clock()
        try:
            self._verify()
        except PipelineLocked as error:
            self._held, self._lost = False, error
            raise
        except HeadwaterError as error:
            if not passes(error):
                raise
            if error.message != self._last_error:
                self._last_error = error.message
                log.warning("nothing is written until the pipeline's lock is held again: %s", error)
            return False
        finally:
            self._tried = self._clock()
        # From when it was asked: that the session was alive later is not known.
        self._verified = asked
        if not self._held:
            log.warning("the pipeline's lock was lost and is held again; no other run has begun meanwhile")
            self._held, self._last_error = True, ""
        return True

    def _verify(self) -> None:
        try:
            position = self._lock.check()
            if position is not None:
                self._seen(position)
        except PipelineLocked:
            # The server may only have restarted: the lock is ours again unless another run took it.
            self._held = False
            if self._lost_at is None:
                self._lost_at = self._clock()
            self._lock.release()
            self._lock.acquire()
            # Whatever the store says next: sessions can be opened again.
            self._lost_at = None
        if not self._held and self._begun:
            # Another run may have had the lock and ended since: then what is on record is its own.
            self._store.check_run()
