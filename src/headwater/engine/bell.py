"""How threads wake each other: somebody rings, the owner looks again. No message is carried, so none can be lost."""

from __future__ import annotations

import threading


class Bell:
    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rung = False

    def ring(self) -> None:
        with self._condition:
            self._rung = True
            self._condition.notify_all()

    def wait(self, timeout_seconds: float) -> None:
        """Return when rung since the last wait, or after the timeout."""
        with self._condition:
            self._condition.wait_for(lambda: self._rung, timeout_seconds)
            self._rung = False
