"""A destination that keeps tables in memory, each with its rows by key: what the lake would have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from headwater.contracts.destination import Destination, RunContext
from headwater.contracts.results import DropTableForCopyResult, WriteEventsResult, WriteTableRowsResult
from headwater.events import UNCHANGED, Delete, EventBatch, Insert, TableRow, TableRows, Truncate, Update
from headwater.lsn import EndLsn
from headwater.schema.table import ReplicatedTableSchema, TableId


class MemoryTables(Destination):
    """Rows by key. What a watermark covers is skipped, as in any destination where a change takes effect once."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[Any, TableRow]] = {}
        self.watermarks: dict[str, tuple[int, int]] = {}
        self.copies: list[str] = []
        self._names: dict[TableId, str] = {}
        self.batches: list[EventBatch] = []
        self.shutdowns = 0
        self.before_copy: Callable[[TableRows], None] = lambda rows: None
        self.during_copy: Callable[[TableRows], None] = lambda rows: None
        self.after_copy: Callable[[TableRows], object] = lambda rows: None
        self.before_events: Callable[[EventBatch], None] = lambda batch: None
        self._lock = threading.Lock()

    @classmethod
    def name(cls) -> str:
        return "tables in memory"

    def start(self, context: RunContext) -> None:
        self.context = context

    def shutdown(self) -> None:
        self.shutdowns += 1

    def furthest_position(self, table_ids: Sequence[TableId]) -> EndLsn | None:
        with self._lock:
            marks = [self.watermarks[self._names[table]] for table in table_ids if table in self._names]
            return max((EndLsn(lsn + (ordinal >= 0)) for lsn, ordinal in marks), default=None)

    def drop_table_for_copy(
        self, replicated_table_schema: ReplicatedTableSchema, result: DropTableForCopyResult
    ) -> None:
        result.done()

    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        self.before_copy(table_rows)
        name = replicated_table_schema.name.name
        key = _key(replicated_table_schema)
        rows: dict[Any, TableRow] = {}
        for number, row in enumerate(table_rows.rows()):
            if number == 0:
                self.during_copy(table_rows)
            assert row[key] not in rows, "a row was copied twice"
            rows[row[key]] = row
        with self._lock:
            self.tables[name] = rows
            self.watermarks[name] = (table_rows.start_lsn.value, -1)
            self.copies.append(name)
            self._names[replicated_table_schema.id] = name
        self.after_copy(table_rows)
        result.done()

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        self.before_events(events)
        with self._lock:
            self.batches.append(events)
            for event in events.events():
                if isinstance(event, (Insert, Update, Delete, Truncate)):
                    self._apply(event)
        result.done()

    def _apply(self, event: Insert | Update | Delete | Truncate) -> None:
        name, key = event.schema.name.name, _key(event.schema)
        at = (event.commit_lsn.value, event.ordinal)
        if at <= self.watermarks[name]:
            return
        self.watermarks[name] = at
        rows = self.tables[name]
        if isinstance(event, Truncate):
            rows.clear()
        elif isinstance(event, Delete):
            rows.pop(event.old[key], None)
        else:
            before = rows.get(event.new[key])
            if isinstance(event, Update) and event.old is not None:
                before = rows.pop(event.old[key], before)
            values = zip(event.new, before or event.new, strict=True)
            rows[event.new[key]] = tuple(old if new is UNCHANGED else new for new, old in values)


def _key(schema: ReplicatedTableSchema) -> int:
    return [column.name for column in schema.columns].index(schema.key[0])
