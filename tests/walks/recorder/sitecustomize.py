"""Writes down which modules of Headwater run, in each thread of each Python process that has this directory on its PYTHONPATH.

Python imports a module of this name at its start, so Spark's Python workers are recorded as the driver is.
`sys.setprofile` does it and not `sys.monitoring`, which Python 3.11 does not have; numba reports the calls of compiled
kernels too. `threading.setprofile` is for threads to come: none was started before this module.

A line is written when a function or method begins while the directory `current` exists. What runs because a module is imported is
left out.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import FrameType

_PACKAGE = os.environ["HEADWATER_WALKS_PACKAGE"] + os.sep
_CURRENT = os.path.join(os.environ["HEADWATER_WALKS"], "current")
_written: set[tuple[int, str, str, str]] = set()


def _called(frame: FrameType, event: str, _argument: object) -> None:
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(_PACKAGE):
        return
    try:
        recording = os.stat(_CURRENT).st_ino
    except FileNotFoundError:
        return
    thread = threading.current_thread().name
    called = (recording, thread, code.co_filename, code.co_qualname)
    if called in _written or _is_imported(frame):
        return
    _written.add(called)
    line = {
        "at": time.monotonic(),
        "thread": thread,
        "module": code.co_filename.removeprefix(_PACKAGE),
        "function": code.co_qualname,
    }
    try:
        with open(os.path.join(_CURRENT, str(os.getpid())), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except FileNotFoundError:
        pass  # the recording has just ended


def _is_imported(frame: FrameType | None) -> bool:
    """Whether this runs because a module is executed that is not the program itself."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


threading.setprofile(_called)
sys.setprofile(_called)
