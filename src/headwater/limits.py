"""Limits of this process and this machine: files, threads, memory for a socket, room on a disk.

A limit that is reached is no error of a table or of a setting of the pipeline: it passes when other work releases what it has, or
when the operator raises the limit. So it is waited for like a server that is unreachable. It is recognised by its errno. Some
libraries keep only the text, or report it as a failure to look up a name or to read a file; then the text decides, or a test
whether a file can be opened now.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import LimitReached

_FILES = (
    "Raise the limit (`ulimit -n`, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container), or close what else this "
    "process has open. Headwater retries."
)
_MEMORY = "Free memory on this machine, or raise the limit of the container. Headwater retries."
_LIMITS = {
    errno.EMFILE: ("this process has reached its limit of open files and sockets", _FILES),
    errno.ENFILE: (
        "this machine has reached its limit of open files and sockets",
        "Raise the sysctl fs.file-max, or end the processes that hold them. Headwater retries.",
    ),
    errno.ENOBUFS: ("the system has no memory for a socket", _MEMORY),
    errno.ENOMEM: ("the system gives no more memory", _MEMORY),
    errno.ENOSPC: ("the disk is full", "Free space on it. Headwater retries."),
    errno.EDQUOT: ("the disk quota is used up", "Free space, or raise the quota. Headwater retries."),
}
_THREADS = (
    "this process can start no more threads",
    "Raise the limit (`ulimit -u`, TasksMax= of a systemd unit, --pids-limit of a container), or free memory. Headwater retries.",
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
    """The same for a library that gives text only. The limit of open files is also tested for, whatever the text says."""
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
