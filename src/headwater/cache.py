"""Where downloads are kept between runs, and how each becomes visible only when it is complete.

Server binaries, jars and the Java shim are in the user's cache directory, never in the checkout or the package. Does not know
what it keeps.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from headwater.private_files import check_owner, make_directory


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/headwater`, by default `~/.cache/headwater`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification asks to ignore relative paths.
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "headwater"


def install(target: Path, fill: Callable[[Path], object]) -> Path:
    """Make the directory `target` once, however many processes ask for it at the same time.

    `fill` gets an empty directory beside the target, which takes the target's name only when `fill` has returned: a
    process killed half way leaves nothing that looks finished.
    """
    # What lies here is run: in a directory of another user's it would be that user's programs. Not the target's own owner:
    # what a server of root's tests runs belongs to the user it runs as.
    check_owner(make_directory(target.parent))
    if target.exists():
        return target
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        partial = target.parent / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            fill(partial)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return target
