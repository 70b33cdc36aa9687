"""How threads wake each other: one notifies, the owner looks again. No message is carried, so none can be lost."""

from __future__ import annotations

import threading


class WakeUp:
    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._notified = False

    def notify(self) -> None:
        with self._condition:
            self._notified = True
            self._condition.notify_all()

    def wait(self, timeout_seconds: float) -> None:
        """Return when notified since the last wait, or after the timeout."""
        with self._condition:
            self._condition.wait_for(lambda: self._notified, timeout_seconds)
            self._notified = False
