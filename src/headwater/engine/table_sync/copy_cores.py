"""A core for changes: how many of Spark's cores copies may hold for long.

FAIR scheduling does not preempt: a copy whose tasks last for seconds, on every core, lets a change of another table wait for a
task's end at each of its stages. Measured on two cores while five million rows were copied: 13 times as long from commit to
visible with tasks of 64 MiB on both, 3 times with tasks of 8 MiB on both, 1.5 times with one task on one. The copy was about
as fast in all three: the server, the decoder and the writer of one task are three processes at work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headwater.source.copy_plan import MIN_RANGE_BYTES, TARGET_RANGE_BYTES


@dataclass(frozen=True, slots=True)
class CopyShare:
    """How a copy is cut: into ranges of about this size, read by so many connections at once."""

    connections: int
    range_bytes: int = TARGET_RANGE_BYTES


class CopyCores:
    """Shared by all table sync workers.

    `slots` is how many tasks Spark runs at once, or None where that is not for us to divide; `connections` how many a copy
    may have, `copies` how many there may be.
    """

    def __init__(self, slots: int | None, connections: int, copies: int) -> None:
        self._slots = slots
        self.connections = connections
        """How many a copy may have."""
        self._copies = copies
        self._left = max(1, slots - 1) if slots is not None else 0
        self._lock = threading.Lock()

    @property
    def beside_changes(self) -> int:
        """How many tasks leave a core for changes."""
        return self.connections if self._slots is None else min(self.connections, max(1, self._slots - 1))

    @contextmanager
    def share(self, *, alone: bool) -> Iterator[CopyShare]:
        """Held while a copy runs. `alone` says that there is no other table whose changes could wait for it."""
        if alone or self._slots is None:
            yield CopyShare(self.connections)
            return
        taken = self._take()
        try:
            # With none left, other copies have their cores for long: what remains is shared with changes, task by task.
            yield CopyShare(taken) if taken else CopyShare(self.connections, MIN_RANGE_BYTES)
        finally:
            with self._lock:
                self._left += taken
                self._copies += 1

    def _take(self) -> int:
        """One core at least, if there is one, and more than that only if those who may come find one too."""
        with self._lock:
            self._copies -= 1
            taken = min(self.connections, max(self._left - self._copies, min(1, self._left)))
            self._left -= taken
            return taken
