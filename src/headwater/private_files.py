"""Directories and files of Headwater that other users of the machine can neither read nor create in advance.

Names under the system's temporary directory can be guessed, and the user who creates a directory first owns it: that user could
read the rows that we put there, or redirect our writes and deletes with a link. So a path is checked component by component:
below a directory that every user may write to, the next one must be ours or root's, and no link. Directories that we create have
mode 0700, files 0600; the modes of what the user created stay as they are.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from headwater.errors import ConfigError

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
_ROOT = 0


def make_directory(path: Path) -> Path:
    """The directory, checked, and made with whatever is missing above it."""
    path = path.absolute()
    check_path(path)
    for directory in reversed([path, *path.parents]):
        if not os.path.lexists(directory):
            try:
                os.mkdir(directory, DIRECTORY_MODE)
            except FileExistsError:
                continue  # created by another process meanwhile; its owner is checked below
    path.mkdir(exist_ok=True)
    check_path(path)
    return path


def own_directory(path: Path) -> Path:
    """A directory that other users cannot read, created if missing: it and the one above it are ours, with mode 0700."""
    make_directory(path)
    for directory in (path.parent, path):
        check_owner(directory)
    if stat.S_IMODE(path.stat().st_mode) != DIRECTORY_MODE:
        path.chmod(DIRECTORY_MODE)
    return path


def temporary_directory(name: str) -> Path:
    """A directory of this name and this user in the system's temporary one."""
    # Not `headwater-<uid>`, where servers of tests run, as another user if we are root.
    own = make_directory(Path(tempfile.gettempdir()) / f"headwater-private-{os.geteuid()}")
    return own_directory(own / name)


def new_file(path: Path) -> int:
    """The descriptor of a file that was not there before, for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def make_file(path: Path) -> None:
    """An empty file, if there is none; checked like a directory if there is one."""
    try:
        os.close(new_file(path))
    except FileExistsError:
        check_path(path)


def check_owner(path: Path) -> None:
    """ConfigError if another user than root or ourselves owns it."""
    check_path(path)
    found = path.stat()
    if not _is_ours(found):
        raise _refused(path, f"user {found.st_uid} owns it; this process runs as user {os.geteuid()}")


def check_path(path: Path) -> None:
    """ConfigError if another user may have put there what the path leads to. A path that does not exist yet passes."""
    path = path.absolute()
    parent = Path(path.anchor)
    for name in path.parts[1:]:
        current = parent / name
        try:
            found, above = os.lstat(current), os.stat(parent)
        except OSError:
            return  # does not exist, or may not be read: to use it then fails
        if above.st_mode & stat.S_IWOTH:
            if stat.S_ISLNK(found.st_mode):
                raise _refused(current, f"it is a symbolic link in {parent}, to which every user may write")
            if not _is_ours(found):
                raise _refused(
                    current,
                    f"user {found.st_uid} made it in {parent}, to which every user may write; "
                    f"this process runs as user {os.geteuid()}",
                )
        if stat.S_ISLNK(found.st_mode):
            if not os.path.exists(current):
                return  # leads nowhere, or in a circle
            # As the link says it: resolved at once, links on its way would not be seen.
            check_path(parent / os.readlink(current))
            current = Path(os.path.realpath(current))
        parent = current


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid in (os.geteuid(), _ROOT)


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not safe: another user could read or replace it",
        detail=why,
        hint="Remove it if it is not needed, or name a directory that only you can write to: destination.warehouse, "
        "batch.spool_directory, or the environment variables TMPDIR and XDG_CACHE_HOME.",
    )
