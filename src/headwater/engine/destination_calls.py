"""Calls to the destination, made by named threads so that the engine never blocks inside one.

A destination may work inside the call or return and complete the handle later. What it raises is the handle's failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from headwater.contracts.results import PendingResult, Result
from headwater.limits import limit_reached

R = TypeVar("R", bound=Result)


def call(name: str, result: R, method: Callable[[R], None], deadline_seconds: float | None = None) -> PendingResult:
    """Call `method(result)` in a thread of its own; the caller keeps no reference to the handle, so a dropped one is seen."""
    pending = PendingResult(result, deadline_seconds)
    box = [result]
    del result

    def run() -> None:
        handle = box.pop()
        try:
            method(handle)
        except Exception as error:
            handle.failed(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        # The call's failure, and not ours: it is then made again as any other that could not be made.
        box.pop().failed(limit_reached(error, "calling the destination") or error)
    return pending
