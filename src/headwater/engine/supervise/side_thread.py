"""Work beside the supervising thread, which waits for no server and for no lock of another thread.

Whatever asks a server or the store has a thread of its own, with a name. Its waits end some seconds after a stop (see
`wire.patience`), so such a thread is given a little more than that to end, and is left then: it holds nothing that the end of
a run needs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from headwater.errors import said_by, where_raised
from headwater.limits import limit_reached

log = logging.getLogger(__name__)

LEAVE_SECONDS = 30.0
"""After a stop: one silent answer, one attempt to connect, and some."""


_LIMITED_SECONDS = 1.0


class SideThread:
    """Does `work` again and again until `stop` is set. What it raises goes to `failed`, and ends it."""

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        pause: Callable[[], object],
        stop: threading.Event,
        failed: Callable[[Exception], None],
        *,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`pause` waits between two turns, and returns early where there is reason. `at_end` closes what the work opened."""
        self._work = work
        self._pause = pause
        self._stop = stop
        self._failed = failed
        self._at_end = at_end
        self._told = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        start_when_possible(self._thread, self._stop)

    def join(self, seconds: float = LEAVE_SECONDS) -> bool:
        """Whether it has ended, or never began."""
        return join_if_started(self._thread, seconds)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._work_unless_limited()
                self._pause()
        except Exception as error:
            self._failed(error)
        finally:
            self._at_end()

    def _work_unless_limited(self) -> None:
        """Its turn is over if this process may open no more files or start no more threads for now; the next one comes."""
        try:
            self._work()
            self._told = ""
        except Exception as error:
            limit = limit_reached(error, f"{threading.current_thread().name} was at work")
            if limit is None:
                raise
            if limit.message != self._told:
                self._told = limit.message
                log.warning("%s", limit)
            self._stop.wait(_LIMITED_SECONDS)


def start_when_possible(thread: threading.Thread, stop: threading.Event) -> bool:
    """Start it as soon as the system gives a thread; False once `stop` is set before that."""
    told = False
    while True:
        try:
            thread.start()
            return True
        except RuntimeError as error:
            limit = limit_reached(error, f"starting {thread.name}")
            if limit is None:
                raise
            if not told:
                log.warning("%s", limit)
            told = True
        if stop.wait(_LIMITED_SECONDS):
            return False


def join_if_started(thread: threading.Thread, seconds: float | None) -> bool:
    """Whether it is not running."""
    if thread.ident is not None:
        thread.join(seconds)
    return not thread.is_alive()


def aside(what: str, work: Callable[[], None], seconds: float = LEAVE_SECONDS) -> None:
    """Do it once, in a thread of its own, and wait a bounded time for it. What it raises is logged."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            log.warning("%s failed: %s", what, said_by(error))
            log.debug("%s", where_raised(error))

    thread = threading.Thread(target=run, name=f"headwater-{what.replace(' ', '-')}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        run()  # no thread to be had: its waits are bounded too
        return
    thread.join(seconds)
    if thread.is_alive():
        log.warning("%s takes longer than %.0f s, and is left", what, seconds)
