"""How long to wait for an answer: a server that sends nothing is either at work or unreachable, and the socket does not show
which.

TCP notices a host that died. It does not notice a proxy that keeps sockets open and forwards nothing, nor a server process that
hangs. A plain deadline would end statements that legitimately take long: the creation of a slot may be blocked for hours, a COPY
may filter a large table and send nothing. So after half the answer timeout without a byte, the server is asked over a new
connection: does it answer, and is this session at work? If so, the wait continues. Short statements have a deadline as well.

A stop of the run makes all of this short: a session that sends nothing for some seconds after it is given up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum

from headwater.errors import ConnectionLost
from headwater.wire.settings import ConnectSettings

_log = logging.getLogger(__name__)

STEP_SECONDS = 0.25
"""How often a wait looks at the clock and at a stop."""
STOP_SECONDS = 5.0
"""How long a session may be silent once the run was asked to stop."""
_DOUBT_SECONDS = 5.0


class ServerSilent(ConnectionLost):
    """The connection looks open, and no answer comes."""


class Verdict(StrEnum):
    """What the server reports of a session that has sent nothing for a while."""

    AT_WORK = "at work"
    """Or it cannot be known, and the server answers other sessions."""
    IDLE = "for the server this session is idle: it has sent its answer"
    """An answer may be on its way: asked once more."""
    STUCK = "the server has sent something that did not arrive"
    GONE = "the server has no such session any more"
    NO_ANSWER = "the server does not answer a new connection either"


class Patience:
    """How long one session is waited for, for one statement after the other. Belongs to the thread that waits."""

    def __init__(
        self, settings: ConnectSettings, ask: Callable[[ConnectSettings, int], Verdict] | None, backend_pid: int = 0
    ) -> None:
        """`ask` asks the server about a session by its pid; None for a session that is not asked about."""
        self.backend_pid = backend_pid
        self._settings = settings
        self._ask = ask
        self._longest_seconds: float | None = None
        self._heard_at = self._ask_at = 0.0
        self._stopped_at: float | None = None
        self._doubted = False
        self._silent: ServerSilent | None = None
        self.begin(None)

    def begin(self, longest_seconds: float | None) -> None:
        """A statement is sent. `longest_seconds` without a byte end the wait, whatever the server reports of the session."""
        self._longest_seconds = longest_seconds
        self._stopped_at = None
        self.heard()

    def heard(self) -> None:
        """Bytes came."""
        self._heard_at = time.monotonic()
        self._ask_at = self._heard_at + self._settings.answer_timeout_seconds / 2
        self._doubted, self._silent = False, None

    @property
    def step_seconds(self) -> float:
        """How long to wait now before `check`."""
        return min(STEP_SECONDS, self._settings.answer_timeout_seconds / 8)

    def check(self) -> None:
        """After a wait in which nothing came. Raises ConnectionLost when there is nothing to wait for."""
        if self._silent is not None:
            # Nothing came after the verdict either; asking takes seconds in which an answer may have come.
            _log.warning("%s", self._silent)
            raise self._silent
        now = time.monotonic()
        self._check_stop(now)
        if self._longest_seconds is not None and now - self._heard_at >= self._longest_seconds:
            self._silent = silent(self._settings, now - self._heard_at, "a short statement got no answer")
        elif self._ask is not None and now >= self._ask_at:
            self._judge(self._ask(self._settings, self.backend_pid))

    def _check_stop(self, now: float) -> None:
        stop = self._settings.interrupt
        if stop is None or not stop.is_set():
            return
        if self._stopped_at is None:
            self._stopped_at = now
        if now - max(self._stopped_at, self._heard_at) >= STOP_SECONDS:
            raise ConnectionLost(
                f"the pipeline was stopped while it waited for the server at {self._settings.address}",
                detail=f"the server sent nothing for {now - self._heard_at:.0f} s",
                hint="Nothing is lost; start the pipeline again to continue.",
            )

    def _judge(self, verdict: Verdict) -> None:
        now = time.monotonic()
        if verdict is Verdict.AT_WORK:
            self._doubted = False
            self._ask_at = now + self._settings.answer_timeout_seconds / 2
        elif verdict is Verdict.IDLE and not self._doubted:
            self._doubted = True
            self._ask_at = now + min(_DOUBT_SECONDS, self._settings.answer_timeout_seconds / 4)
        else:
            self._silent = silent(self._settings, now - self._heard_at, str(verdict))


def silent(settings: ConnectSettings, seconds: float, why: str) -> ServerSilent:
    return ServerSilent(
        f"the server at {settings.address} does not answer",
        detail=f"nothing came for {seconds:.0f} s, and {why}",
        hint="Look for a proxy or load balancer that holds connections open without forwarding, and for a server process that "
        "hangs. Headwater reconnects by itself; answer_timeout_ms of the connection sets how long it waits.",
    )
