"""The directories of running servers, and the user they run as.

A server refuses to run as root, so root's servers run as `postgres` or `nobody`, who can enter neither /root nor a
private temporary directory: everything a server touches lies under a directory of ours in the system's temporary one.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypedDict

from headwater.cache import install
from headwater.errors import HeadwaterError
from headwater.testing.binaries import Installation

# The path of a Unix socket holds 107 bytes, and ours adds about 50.
_LONGEST_BASE = 50


@dataclass(frozen=True, slots=True)
class ServerUser:
    """The user that runs the server: another one if we are root, else ourselves."""

    uid: int
    gid: int

    @classmethod
    def current(cls) -> ServerUser:
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid())
        for name in ("postgres", "nobody"):
            with suppress(KeyError):
                entry = pwd.getpwnam(name)
                return cls(entry.pw_uid, entry.pw_gid)
        raise HeadwaterError(
            "no user to run Postgres as",
            detail="a Postgres server refuses to run as root, and there is neither a user postgres nor nobody",
            hint="Run as an ordinary user, or add a user named postgres.",
        )

    def process_arguments(self) -> ProcessArguments:
        """What `subprocess` needs to run a program as this user."""
        if os.geteuid() != 0:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, *paths: Path) -> None:
        for path in paths:
            os.chown(path, self.uid, self.gid)


class ProcessArguments(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


def runtime_directory() -> Path:
    """A directory of this user's, short and open to the server's user, in the system's temporary directory."""
    for candidate in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):
        base = Path(candidate).resolve() / f"headwater-{os.geteuid()}"
        if len(str(base)) > _LONGEST_BASE or not _can_enter(base.parent):
            continue
        with suppress(OSError):
            base.mkdir(mode=0o755 if os.geteuid() == 0 else 0o700, exist_ok=True)
            found = base.lstat()
            # The name can be guessed: a directory or link of that name that belongs to another user is not used.
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                return base
    raise HeadwaterError(
        "no directory to run a Postgres server in",
        detail=f"neither {tempfile.gettempdir()}, /tmp nor /var/tmp is writable, short, and open to the server's user",
        hint="Set TMPDIR to a short path that every user may enter.",
    )


def _can_enter(directory: Path) -> bool:
    """Whether the server's user can reach it; for an ordinary user that is the same user."""
    if os.geteuid() != 0:
        return os.access(directory, os.X_OK)
    return all(path.stat().st_mode & stat.S_IXOTH for path in (directory, *directory.parents))


def runnable(installation: Installation) -> Installation:
    """The installation where the server's user can run it: itself, or a copy if root's cache is closed to others."""
    if os.geteuid() != 0 or _can_enter(installation.directory.resolve()):
        return installation
    # The whole tree beside it: a wheel that bundles its libraries keeps them two levels up.
    levels = 2 if installation.origin == "bundled" else 0
    root = installation.directory.parents[levels - 1] if levels else installation.directory
    target = runtime_directory() / f"postgres-{root.name}"
    install(target, lambda partial: shutil.copytree(root, partial, symlinks=True, dirs_exist_ok=True))
    return Installation(target / installation.directory.relative_to(root), installation.version, installation.origin)


@dataclass(slots=True)
class ServerDirectory:
    """One server's files. The lock on it says that its owner lives."""

    path: Path
    temporary: bool
    _lock: IO[str]

    @classmethod
    def create(cls, user: ServerUser, path: Path | None = None) -> ServerDirectory:
        if path is not None:
            path = path.resolve()
            path.mkdir(parents=True, exist_ok=True)
            user.own(path)
            return cls(path, False, _hold(path))
        servers = runtime_directory() / "servers"
        with _exclusive(servers):
            sweep(servers)
            path = Path(tempfile.mkdtemp(dir=servers, prefix=""))
            lock = _hold(path)
        user.own(path)
        return cls(path, True, lock)

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def log(self) -> Path:
        return self.path / "server.log"

    def release(self) -> None:
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def let_go_after_fork(self) -> None:
        """A forked child must not keep the lock when the owner has died."""
        os.close(self._lock.fileno())


def sweep(servers: Path) -> None:
    """Remove what a machine's crash left; a killed process's server is its watchdog's to end."""
    for path in servers.iterdir():
        if not path.is_dir():
            continue
        with suppress(OSError):
            lock = _hold(path)
            pid = server_pid(path / "data")
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(path, ignore_errors=True)
            lock.close()


def server_pid(data: Path) -> int | None:
    """The number of the server that runs in this data directory, if one does."""
    with suppress(OSError, ValueError, IndexError):
        pid = int((data / "postmaster.pid").read_text().splitlines()[0])
        # A server works in its data directory, so another process that was given its pid is recognised.
        if Path(f"/proc/{pid}/cwd").readlink() == data:
            return pid
    return None


def _hold(path: Path) -> IO[str]:
    lock = open(path / "owner.lock", "w")  # noqa: SIM115 - held for the server's life
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock


@contextmanager
def _exclusive(servers: Path) -> Iterator[None]:
    """Making and sweeping exclude each other: a directory just made has no lock yet and would look abandoned."""
    servers.mkdir(mode=0o755, exist_ok=True)
    with open(servers / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start_watchdog(directory: ServerDirectory) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("watchdog.sh")
    command = ["/bin/sh", str(script), str(directory.data)]
    if directory.temporary:
        command.append(str(directory.path))
    # Its own session: the terminal's interrupt is for us, and must find the watchdog still there if we die of it.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
