"""A stop of the whole run, and of parts of it."""

from __future__ import annotations

import threading
import weakref


class Stop(threading.Event):
    """Setting it sets all that were made from it; setting one of those stops nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._parts: weakref.WeakSet[Stop] = weakref.WeakSet()

    def part(self) -> Stop:
        made = Stop()
        with self._guard:
            self._parts.add(made)
            if self.is_set():
                made.set()
        return made

    def set(self) -> None:
        super().set()
        with self._guard:
            parts = list(self._parts)
        for part in parts:
            part.set()
