"""How much memory there is and how much is in use; and the watch that tells when it is short.

A container's limit counts where there is one, else the machine's memory. File pages that the system may take back are not
in use: what we spill lies there.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from headwater.config.pipeline import BatchConfig, MemoryBackpressureConfig
from headwater.errors import ConfigError
from headwater.private_files import check_owner
from headwater.wire.spool import MemoryBudget, Spool

log = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Memory:
    used_bytes: int
    total_bytes: int

    @property
    def used_ratio(self) -> float:
        return self.used_bytes / self.total_bytes


def memory_now() -> Memory:
    machine = _of_machine()
    container = _of_container()
    return container if container is not None and container.total_bytes < machine.total_bytes else machine


def _of_machine() -> Memory:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        # Not Linux: how much there is can be said, how much is in use cannot.
        return Memory(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Memory(total - available, total)


def _of_container() -> Memory | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        current = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return Memory(max(current - int(statistics.get("inactive_file", 0)), 0), int(limit))
    except (OSError, ValueError):
        return None


def stream_budget(config: BatchConfig, monitor: MemoryMonitor) -> MemoryBudget:
    """What the streams of a run may hold together; never less than one ordinary batch."""
    share = int(memory_now().total_bytes * config.memory_budget_ratio)
    return MemoryBudget(max(share, config.max_bytes), lambda: monitor.is_short)


def spool(config: BatchConfig) -> Spool:
    directory = Path(config.spool_directory or tempfile.gettempdir())
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"batch.spool_directory {directory} cannot be used",
            detail="it is no directory, or we may not write there",
            hint="Make the directory, or name another one: large transactions are kept there while they are written.",
        )
    # The owner of the directory can put another file in place of ours while we write.
    check_owner(directory)
    return Spool(directory)


class MemoryMonitor:
    """Looks at the use of memory at an interval, in a thread of its own. Without limits it never finds it short."""

    def __init__(self, limits: MemoryBackpressureConfig | None, interval_seconds: float) -> None:
        self._limits = limits
        self._interval_seconds = interval_seconds
        self._short = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-memory", daemon=True)

    @property
    def is_short(self) -> bool:
        """Between `activate` and `resume`: reading pauses while something can be written, and goes to disk if not."""
        return self._short.is_set()

    def start(self) -> None:
        if self._limits is not None:
            self.look(memory_now())
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self, memory: Memory) -> None:
        limits, ratio = self._limits, memory.used_ratio
        if limits is None:
            return
        if ratio >= limits.activate and not self.is_short:
            self._short.set()
            log.warning(
                "memory is short: %.0f %% of %.1f GiB in use; reading pauses until below %.0f %%, larger transactions go to disk",
                100 * ratio,
                memory.total_bytes / 2**30,
                100 * limits.resume,
            )
        elif ratio < limits.resume and self.is_short:
            self._short.clear()
            log.info("memory is no longer short: %.0f %% in use", 100 * ratio)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            self.look(memory_now())
