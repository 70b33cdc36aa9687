"""Ctrl-C and SIGTERM: the first asks for an orderly stop, the second ends the process at once.

The interpreter's own C handler writes the signal's number to a socket, and a thread reads it. So nothing runs inside
a signal handler, where taking a lock that the interrupted code holds would wait for ever.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

from headwater.observability.outlet import flush

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END = b"\0"


_LAST_LINES_SECONDS = 1.0


def _end_at_once(status: int) -> None:
    """Write what was logged until now, if standard error takes it."""
    flush(_LAST_LINES_SECONDS)
    os._exit(status)


def _noted(signum: int, frame: FrameType | None) -> None:
    """A Python handler must be installed for the interpreter to note the signal; the work is done elsewhere."""


class StopSignals:
    """A context manager for the main thread. `request_stop` is called once, in a thread of its own."""

    def __init__(self, request_stop: Callable[[], None], give_up: Callable[[int], None] = _end_at_once) -> None:
        self._request_stop = request_stop
        self._give_up = give_up
        self._reader, self._writer = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="headwater-signals", daemon=True)
        self._before: dict[signal.Signals, object] = {}
        self.requested = threading.Event()

    def __enter__(self) -> Self:
        self._writer.setblocking(False)
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.arm()
        self._thread.start()
        return self

    def arm(self) -> None:
        """Install the handlers, again if need be: starting Spark replaces SIGINT's by one that cancels all jobs."""
        for number in STOP_SIGNALS:
            signal.signal(number, _noted)

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._before_fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._writer.send(_END)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _watch(self) -> None:
        stop_thread: threading.Thread | None = None
        while True:
            for number in self._reader.recv(64):
                if number == _END[0]:
                    return
                if number not in STOP_SIGNALS:
                    continue
                if stop_thread is not None:
                    self._give_up(128 + number)
                    return
                self.requested.set()
                # In a thread of its own, so that a stop that blocks can't keep the second signal from being read.
                stop_thread = threading.Thread(target=self._request_stop, name="headwater-stop", daemon=True)
                stop_thread.start()
