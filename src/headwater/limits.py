"""Limits of this process and this machine: files, threads, memory for a socket, room on a disk.

Whoever meets one has done nothing wrong, and meets it no more once others have let go or a person has raised it: it is waited for
like a server that is unreachable. The system's number tells it; libraries that keep only its text, or hide it behind a failure to
look up a name or to read a file, are found out by their text, or by trying whether a file can be opened now.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import LimitReached

_FILES = (
    "Raise the limit (`ulimit -n`, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container), or close what else this "
    "process has open. It is tried again."
)
_MEMORY = "Free memory on this machine, or raise the limit of the container. It is tried again."
_LIMITS = {
    errno.EMFILE: ("this process has as many files and sockets open as it may", _FILES),
    errno.ENFILE: (
        "this machine has as many files and sockets open as it may",
        "Raise the sysctl fs.file-max, or end what holds them. It is tried again.",
    ),
    errno.ENOBUFS: ("the system has no memory for a socket", _MEMORY),
    errno.ENOMEM: ("the system gives no more memory", _MEMORY),
    errno.ENOSPC: ("the disk is full", "Make room there. It is tried again."),
    errno.EDQUOT: ("the quota of the disk is used up", "Make room there, or raise the quota. It is tried again."),
}
_THREADS = (
    "this process can start no more threads",
    "Raise the limit (`ulimit -u`, TasksMax= of a systemd unit, --pids-limit of a container), or free memory. It is tried again.",
)
_NO_THREAD = "can't start new thread"
_TOLD_BY_TEXT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def limit_reached(error: BaseException, doing: str) -> LimitReached | None:
    """Our error for one that a limit caused, directly or through others; None for any other. `doing` completes "while"."""
    for one in _chain(error):
        if isinstance(one, LimitReached):
            return one
        if isinstance(one, OSError) and one.errno in _LIMITS:
            return _named(_LIMITS[one.errno], doing, one.strerror or str(one))
        if isinstance(one, RuntimeError) and _NO_THREAD in str(one):
            return _named(_THREADS, doing, str(one))
    return None


def limit_told(text: str, doing: str) -> LimitReached | None:
    """The same for a library that gives text only. No more files is also found by trying, whatever the text says."""
    for number in _TOLD_BY_TEXT:
        if os.strerror(number) in text:
            return _named(_LIMITS[number], doing, os.strerror(number))
    return no_more_files(doing)


def no_more_files(doing: str) -> LimitReached | None:
    """Whether no file can be opened now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return limit_reached(error, doing)
    return None


@contextmanager
def naming_limits(doing: str) -> Iterator[None]:
    """What a limit causes inside is raised as LimitReached; all else as it is."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        limit = limit_reached(error, doing)
        if limit is None:
            raise
        raise limit from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        # Py4J keeps its own.
        cause = getattr(one, "cause", None)
        one = one.__cause__ or (cause if isinstance(cause, BaseException) else None) or one.__context__


def _named(limit: tuple[str, str], doing: str, said: str) -> LimitReached:
    message, hint = limit
    return LimitReached(message, detail=f"{said}, while {doing}", hint=hint)
