"""Text on its way to a stream that may take nothing: standard output and standard error of a process that has other work.

A terminal that is stopped with Ctrl-S, a pager, a log collector that hangs: a write to such a stream waits for ever, and so does
the thread that writes, with any lock that it holds. So text goes into a bounded queue, and one thread writes it. What does not
fit is dropped and counted, and the count is written as soon as there is room. `put` never waits and never raises.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO, cast

MOST_TEXTS = 20_000
MOST_BYTES = 4 << 20
FLUSH_SECONDS = 5.0
"""How long the end of a process waits for its last lines to be taken."""


class Outlet:
    """A stream's queue and its writer. The thread starts with the first text, and ends with the process."""

    def __init__(
        self,
        name: str,
        stream: Callable[[], TextIO | None],
        note: Callable[[int], str],
        *,
        most_texts: int = MOST_TEXTS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`stream` is asked for each text; `note` says that so many texts were dropped."""
        self._name = name
        self._stream = stream
        self._note = note
        self._most_texts = most_texts
        self._most_bytes = most_bytes
        # Reentrant: the garbage collector may run code that logs while a text is put.
        self._changed = threading.Condition(threading.RLock())
        self._texts: deque[tuple[str, int]] = deque()
        self._bytes = 0
        self._dropped = 0
        self._writing = False
        self._works = True
        self._thread: threading.Thread | None = None

    def put(self, text: str) -> None:
        size = len(text.encode(errors="replace"))
        with self._changed:
            if not self._has_room(size):
                self._dropped += 1
            else:
                self._add_note()
                self._add(text, size)
            self._start()
            self._changed.notify_all()

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all is written. False if that took longer, or the stream takes nothing any more."""
        with self._changed:
            self._start()
            return self._changed.wait_for(lambda: not self._texts and not self._writing, seconds) and self._works

    def _has_room(self, size: int) -> bool:
        # One text alone always fits: there was memory to make it.
        return not self._texts or (len(self._texts) < self._most_texts and self._bytes + size <= self._most_bytes)

    def _add(self, text: str, size: int) -> None:
        self._texts.append((text, size))
        self._bytes += size

    def _add_note(self) -> None:
        if self._dropped:
            text, self._dropped = self._note(self._dropped), 0
            self._add(text, len(text))

    def _start(self) -> None:
        if self._thread is None and self._texts:
            thread = threading.Thread(target=self._run, name=f"headwater-{self._name.replace(' ', '-')}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # no thread to be had just now: the next text tries again
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                # Not after a write that failed: the note of it would fail as well, for ever.
                self._changed.wait_for(lambda: self._texts or (self._dropped and self._works))
                if not self._texts:
                    self._add_note()
                text, size = self._texts.popleft()
                self._writing = True
            works = self._write(text)
            with self._changed:
                self._writing, self._works = False, works
                self._bytes -= size
                self._dropped += not works
                self._changed.notify_all()

    def _write(self, text: str) -> bool:
        try:
            stream = self._stream()
            if stream is None:
                return True  # the process was given none
            try:
                stream.write(text)
            except UnicodeEncodeError as error:
                stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            stream.flush()
        except Exception:
            return False  # closed, gone, or a full disk: it can be reported nowhere
        return True


class OutletFile(io.TextIOBase):
    """An outlet as a file, for those who print."""

    def __init__(self, outlet: Outlet, stream: Callable[[], TextIO | None]) -> None:
        super().__init__()
        self._outlet = outlet
        self._like = stream

    def write(self, text: str) -> int:
        if text:
            self._outlet.put(text)
        return len(text)

    def isatty(self) -> bool:
        stream = self._like()
        try:
            return stream is not None and stream.isatty()
        except ValueError:
            return False  # closed

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._like(), "encoding", None) or "utf-8"


def _standard_output() -> TextIO | None:
    """A live display replaces `sys.stdout` by one that prints through the display's console, which would come back to us."""
    return getattr(sys.stdout, "rich_proxied_file", sys.stdout)


def _standard_error() -> TextIO | None:
    """What it is at that moment: a live display replaces it, so that lines appear above it."""
    return sys.stderr


def _dropped_entries(count: int) -> str:
    at = time.strftime("%H:%M:%S", time.gmtime())
    return f"{at} warning observability log: {count} entries were dropped, because standard error took nothing for a while\n"


def _dropped_output(count: int) -> str:
    return f"{count} outputs were dropped, because standard output took nothing for a while\n"


STANDARD_OUTPUT = Outlet("standard output", _standard_output, _dropped_output)
STANDARD_ERROR = Outlet("standard error", _standard_error, _dropped_entries)


def standard_output() -> TextIO:
    return cast(TextIO, OutletFile(STANDARD_OUTPUT, _standard_output))


def standard_error() -> TextIO:
    return cast(TextIO, OutletFile(STANDARD_ERROR, _standard_error))


def flush(seconds: float = FLUSH_SECONDS) -> bool:
    """Write what is queued for both, in a bounded time. False if something could not be written."""
    deadline = time.monotonic() + seconds
    # Standard error first: it may lead through a display to standard output.
    done = [outlet.flush(max(0.0, deadline - time.monotonic())) for outlet in (STANDARD_ERROR, STANDARD_OUTPUT)]
    return all(done)
