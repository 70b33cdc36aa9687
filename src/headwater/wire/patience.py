"""How long an answer is waited for: a server that says nothing is at work, or it is gone, and the socket does not tell.

TCP sees a host that died. It does not see a proxy that keeps sockets open and forwards nothing, nor a server process that
hangs. A plain deadline would end what takes its time: making a slot waits for hours, a COPY may filter a large table and
send nothing. So silence of half the answer timeout leads to a question over a new connection: does the server answer, and
is this session at work there? One that is stays waited for. Short statements have a deadline besides.

A stop of the run makes all of this short: what says nothing for some seconds after it is left.
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
    """The session looks open, and no answer comes."""


class Verdict(StrEnum):
    """What a server says of a session that has said nothing for a while."""

    AT_WORK = "at work"
    """Or it cannot be known, and the server answers others."""
    IDLE = "the server believes it has answered"
    """An answer may be on its way: asked once more."""
    STUCK = "the server has sent something that did not arrive"
    GONE = "the server does not know this session"
    NO_ANSWER = "the server does not answer a new connection either"


class Patience:
    """One session's, for one statement after the other. Belongs to the thread that waits."""

    def __init__(
        self, settings: ConnectSettings, ask: Callable[[ConnectSettings, int], Verdict] | None, backend_pid: int = 0
    ) -> None:
        """`ask` asks the server for a session by its number; None for a session that is not asked for."""
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
        """A statement is sent. `longest_seconds` without a byte end it, whatever the server says of it."""
        self._longest_seconds = longest_seconds
        self._stopped_at = None
        self.heard()

    def heard(self) -> None:
        """Something came."""
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
            self._silent = silent(self._settings, now - self._heard_at, "a statement that takes a moment got no answer")
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
                f"the wait for the server at {self._settings.address} was ended by the stop of the pipeline",
                detail=f"nothing came for {now - self._heard_at:.0f} s",
                hint="Nothing is lost; start the pipeline again to go on.",
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
        f"the server at {settings.address} fell silent",
        detail=f"nothing came for {seconds:.0f} s, and {why}",
        hint="Look for a proxy or load balancer that holds connections open without forwarding, and for a server process that "
        "hangs; the connection is made again by itself. answer_timeout_ms of the connection sets the patience.",
    )
