"""Calls to the destination, made by named threads so that the engine never blocks inside one.

A destination may work inside the call or return and complete the handle later. What it raises is the handle's failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from headwater.contracts.destination import Destination
from headwater.contracts.results import (
    DropTableForCopyResult,
    PendingResult,
    Result,
    WriteEventsResult,
    WriteTableRowsResult,
)
from headwater.events import EventBatch, TableRows
from headwater.limits import limit_reached
from headwater.schema.table import ReplicatedTableSchema

R = TypeVar("R", bound=Result)


class DestinationCalls:
    """The calls of a run. `deadline_seconds` is how long the destination may take to complete each; None: as long as it takes."""

    def __init__(self, destination: Destination, deadline_seconds: float | None = None) -> None:
        self._destination = destination
        self._deadline_seconds = deadline_seconds

    def write_events(self, thread: str, batch: EventBatch) -> PendingResult:
        write = self._destination.write_events
        return call(thread, WriteEventsResult(), lambda result: write(batch, result), self._deadline_seconds)

    def write_table_rows(
        self,
        thread: str,
        schema: ReplicatedTableSchema,
        rows: TableRows,
        within: Callable[[Callable[[], None]], None],
    ) -> PendingResult:
        """`within` does the call in its own surroundings: a tag and a pool of Spark jobs."""
        write = self._destination.write_table_rows
        return call(
            thread,
            WriteTableRowsResult(),
            lambda result: within(lambda: write(schema, rows, result)),
            self._deadline_seconds,
        )

    def drop_table_for_copy(self, schema: ReplicatedTableSchema) -> PendingResult:
        drop = self._destination.drop_table_for_copy
        return call(
            "headwater-drop", DropTableForCopyResult(), lambda result: drop(schema, result), self._deadline_seconds
        )


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
