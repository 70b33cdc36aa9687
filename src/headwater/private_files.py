"""Directories and files of ours that other users of the machine can neither read nor have prepared for us.

Names under the system's temporary directory can be guessed, and whoever makes a directory first owns it: he reads the rows that
we put there, or has a link lead our writes and our cleaning up elsewhere. So a path is looked at component by component: below a
directory that everybody may write to, the next one must be ours or root's, and no link. What we make has mode 0700, files 0600;
the modes of what a person made stay as they are.
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
                continue  # somebody was faster; who that was is looked at below
    path.mkdir(exist_ok=True)
    check_path(path)
    return path


def own_directory(path: Path) -> Path:
    """A directory for nobody else's eyes, made if missing: it and the one above it are ours, and it is closed to others."""
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
    """ConfigError if some other user may have put there what the path leads to. What does not exist yet is nobody's."""
    path = path.absolute()
    parent = Path(path.anchor)
    for name in path.parts[1:]:
        current = parent / name
        try:
            found, above = os.lstat(current), os.stat(parent)
        except OSError:
            return  # not there, or not for us to see: whoever uses it is told
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
        f"{path} cannot be trusted",
        detail=why,
        hint="Remove it if it is left over, or name a directory that only you can write to: destination.warehouse, "
        "batch.spool_directory, or the environment variables TMPDIR and XDG_CACHE_HOME.",
    )
