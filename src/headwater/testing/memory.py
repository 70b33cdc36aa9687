"""How much memory a process takes at most while something goes on, as the system counts it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

_EVERY_SECONDS = 0.02


def memory_of(pid: int | str = "self") -> int:
    """Bytes that are the process's own. Pages of files are not: the system takes those back when it needs them."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no memory of its own")


class PeakMemory:
    """Looks at a process again and again until the block ends; `bytes` is the most that was seen."""

    def __init__(self, pid: int | str = "self") -> None:
        self._pid = pid
        self.before = self.bytes = memory_of(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self.bytes = max(self.bytes, memory_of(self._pid))
