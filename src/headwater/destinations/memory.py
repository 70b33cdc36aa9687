"""A destination that keeps what it is given, row by row: for tests, and to look at what a destination is given."""

from __future__ import annotations

import threading

from headwater.contracts.destination import Destination, RunContext
from headwater.contracts.results import DropTableForCopyResult, WriteEventsResult, WriteTableRowsResult
from headwater.errors import DestinationError
from headwater.events import Event, EventBatch, TableRow, TableRows
from headwater.schema.table import ReplicatedTableSchema, TableId


class MemoryDestination(Destination):
    """Not a mirror: rows of copies and events of the stream are kept apart, events as often as they were delivered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[TableId, list[TableRow]] = {}
        self._events: list[Event] = []
        self._failure: Exception | None = None
        self.context: RunContext | None = None
        self.shutdown_count = 0

    @classmethod
    def name(cls) -> str:
        return "memory"

    def start(self, context: RunContext) -> None:
        self.context = context

    def shutdown(self) -> None:
        self.shutdown_count += 1

    def rows(self, table_id: TableId) -> list[TableRow]:
        """The rows of a table's last copy."""
        with self._lock:
            return list(self._rows.get(table_id, []))

    def copied_tables(self) -> set[TableId]:
        with self._lock:
            return set(self._rows)

    def events(self) -> list[Event]:
        """Everything that was streamed, in order of arrival."""
        with self._lock:
            return list(self._events)

    def fail_next(self, error: Exception | None = None) -> None:
        """Let the next write fail, before anything of it is kept."""
        with self._lock:
            self._failure = error or DestinationError(
                "the memory destination was asked to fail", hint="No action is needed: the write is retried."
            )

    def drop_table_for_copy(
        self, replicated_table_schema: ReplicatedTableSchema, result: DropTableForCopyResult
    ) -> None:
        with self._lock:
            self._rows.pop(replicated_table_schema.id, None)
        result.done()

    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        failure = self._take_failure()
        if failure is not None:
            result.failed(failure)
            return
        rows = list(table_rows.rows())
        with self._lock:
            self._rows[replicated_table_schema.id] = rows
        result.done()

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        failure = self._take_failure()
        if failure is not None:
            result.failed(failure)
            return
        arrived = list(events.events())
        with self._lock:
            self._events.extend(arrived)
        result.done()

    def _take_failure(self) -> Exception | None:
        with self._lock:
            failure, self._failure = self._failure, None
            return failure
