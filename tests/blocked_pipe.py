"""A pipe that is full and is not read: what a process writes to when its log collector or pager hangs."""

from __future__ import annotations

import fcntl
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SMALLEST_PIPE_BYTES = 4096


class BlockedPipe:
    """`writer` is for a child. What it begins with is filler, which is not part of what is read."""

    def __init__(self, *, filled: bool = True) -> None:
        self._reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE_BYTES)
        self._filler = 0
        if filled:
            self.fill()

    def fill(self) -> None:
        """Until it takes nothing more."""
        os.set_blocking(self.writer, False)
        with suppress(BlockingIOError):
            while True:
                self._filler += os.write(self.writer, b"." * SMALLEST_PIPE_BYTES)
        with suppress(BlockingIOError):
            while True:
                self._filler += os.write(self.writer, b".")
        # The flag belongs to the open file, which the child shares.
        os.set_blocking(self.writer, True)

    @property
    def is_full(self) -> bool:
        return not select.select([], [self.writer], [], 0)[1]

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close_reader(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1

    def start_reading(self) -> Reading:
        """Reads in a thread, until the last writer has closed the pipe."""
        return Reading(self._reader, self._filler)

    def close(self) -> None:
        self.close_writer()
        self.close_reader()


class Reading:
    def __init__(self, reader: int, filler: int) -> None:
        self._reader = reader
        self._filler = filler
        self._data = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while chunk := os.read(self._reader, 1 << 16):
            self._data += chunk

    @property
    def text(self) -> str:
        return self._data[self._filler :].decode()

    def read_to_end(self, seconds: float = 30.0) -> str:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), self.text
        return self.text


@contextmanager
def blocked_pipe(*, filled: bool = True) -> Iterator[BlockedPipe]:
    pipe = BlockedPipe(filled=filled)
    try:
        yield pipe
    finally:
        pipe.close()
