"""Where a stream's bytes and columns go when they would not fit into memory: files that only we can see.

A transaction larger than the budget goes to disk as it arrives (invariant 4). The files have no name from the moment they
are open, so nothing is left behind, whatever ends the process; what is mapped from them is memory the system may take back.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.errors import SpoolError
from headwater.limits import limit_reached
from headwater.wire.columns import Bytes

_T = TypeVar("_T", bound=np.generic)


class DiskBuffer:
    """Writable bytes that lie in a file."""

    def __init__(self, file: int, size: int) -> None:
        self._map = mmap.mmap(file, size)
        self.data: Bytes = np.frombuffer(self._map, np.uint8)

    def let_go(self) -> None:
        """Keep no page of it in memory; it is read from the file again when it is used."""
        self._map.madvise(mmap.MADV_DONTNEED)


class Spool:
    """Hands out memory that lies in a directory's file system."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.spilled_bytes = 0
        """How much went to disk in all, for the display."""

    def buffer(self, size: int) -> DiskBuffer:
        try:
            with tempfile.TemporaryFile(dir=self._directory, prefix="headwater-") as file:
                # All of it now: a page that finds no room later would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                self.spilled_bytes += size
                return DiskBuffer(file.fileno(), size)
        except OSError as error:
            raise self._failed(error) from error

    def table(self, table: pa.Table) -> pa.Table:
        """The same table, read from a file."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix="headwater-", suffix=".arrow") as file:
                with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(table)
                self.spilled_bytes += Path(file.name).stat().st_size
                return pa.ipc.open_file(pa.memory_map(file.name)).read_all()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> SpoolError:
        hint = "Make room there, or set batch.spool_directory to a larger disk. This is retried."
        limit = limit_reached(error, "opening a file")
        if limit is not None and error.errno in (errno.EMFILE, errno.ENFILE):
            hint = limit.hint
        return SpoolError(
            f"a large transaction could not be written to disk in {self._directory}", detail=str(error), hint=hint
        )

    def array(self, array: npt.NDArray[_T]) -> npt.NDArray[_T]:
        """The same array, in a file."""
        return self.concatenate([array])

    def concatenate(self, arrays: Sequence[npt.NDArray[_T]]) -> npt.NDArray[_T]:
        size = sum(array.nbytes for array in arrays)
        buffer = self.buffer(max(size, 1))
        whole = buffer.data[:size].view(arrays[0].dtype)
        np.concatenate(arrays, out=whole)
        buffer.let_go()
        return whole


def release_free_memory() -> None:
    """After something large: allocators keep what was freed for the next time, and the system counts it as ours."""
    pa.default_memory_pool().release_unused()
    if _malloc_trim is not None:
        _malloc_trim(0)


# Only glibc has it.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


class MemoryBudget:
    """What all streams of a run may hold in memory together; beyond it, and while memory is short, they go to disk."""

    def __init__(self, limit_bytes: int, is_short: Callable[[], bool] = lambda: False) -> None:
        self._limit_bytes = limit_bytes
        self._is_short = is_short
        self._lock = threading.Lock()
        self._held: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def allows(self, holder: object, held_bytes: int) -> bool:
        """Whether a stream that holds so much may take more."""
        with self._lock:
            self._held[holder] = held_bytes
            return sum(self._held.values()) < self._limit_bytes and not self._is_short()
