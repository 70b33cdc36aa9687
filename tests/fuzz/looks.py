"""The engine's looks at the catalog, under a test's control: held back, counted, waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headwater.engine.supervise import publication_watch
from headwater.engine.supervise.publication_watch import PublicationWatch

LOOK_SECONDS = 0.05


class Looks:
    """Installed for all pipelines of the process, until `undo`."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._free = threading.Lock()
        self.count = 0
        self._newest: PublicationWatch | None = None
        original = PublicationWatch.look_if_due

        def look_if_due(looking: PublicationWatch) -> None:
            self._newest = looking
            # The supervising thread has other work: a look that is held back is left out, not waited for.
            if not self._free.acquire(blocking=False):
                return
            try:
                before = looking._next
                original(looking)
                self.count += looking._next != before
            finally:
                self._free.release()

        self._patch.setattr(publication_watch, "LOOK_SECONDS", LOOK_SECONDS)
        self._patch.setattr(PublicationWatch, "look_if_due", look_if_due)

    def hurry(self) -> None:
        """Wake the supervising thread, which would look only when its other work brings it round."""
        if self._newest is not None:
            self._newest._pool.wake_up.notify()

    def undo(self) -> None:
        self._patch.undo()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No look begins or is under way: whatever happens meanwhile happens within one look."""
        with self._free:
            yield
