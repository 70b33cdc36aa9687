"""A destination that keeps whole tables in memory, of every shape: with a key of several columns, without any, insert only.

It does what the contract allows any destination to do and no more, so a table that is wrong here was told wrong by the
engine. What cannot be (an old tuple without its key, a NULL in a key) is the table's error, as invariant 18 asks of all
writers; changes that hit no row are counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from headwater.contracts.destination import Destination, RunContext
from headwater.contracts.results import DropTableForCopyResult, WriteEventsResult, WriteTableRowsResult
from headwater.errors import DestinationError, Retry
from headwater.events import UNCHANGED, Delete, EventBatch, Insert, TableRow, TableRows, Truncate, Update
from headwater.lsn import EndLsn
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema, TableId, TableName

Change = Insert | Update | Delete | Truncate


@dataclass(slots=True)
class ModelTable:
    """The rows of one source table, by key; by the whole row where there is none, as often as they came."""

    columns: tuple[str, ...]
    key: tuple[int, ...]
    rows: dict[str, list[TableRow]] = field(default_factory=dict)
    mark: tuple[int, int] = (0, -1)
    missed: int = 0

    @classmethod
    def of(cls, schema: ReplicatedTableSchema) -> ModelTable:
        columns = tuple(column.name for column in schema.columns)
        return cls(columns, tuple(columns.index(name) for name in schema.key))

    def place(self, row: Sequence[Any]) -> str:
        return repr([row[i] for i in self.key] if self.key else list(row))

    def add(self, row: TableRow) -> None:
        if any(row[i] is None for i in self.key):
            raise _refused("a NULL came in a key")
        if self.key:
            self.rows[self.place(row)] = [row]
        else:
            self.rows.setdefault(self.place(row), []).append(row)

    def remove(self, place: str) -> TableRow | None:
        found = self.rows.get(place)
        if not found:
            self.missed += 1
            return None
        row = found.pop()
        if not found:
            del self.rows[place]
        return row

    def apply(self, event: Change) -> None:
        at = (event.commit_lsn.value, event.ordinal)
        if at <= self.mark:
            return
        if tuple(column.name for column in event.schema.columns) != self.columns:
            raise _refused("a change has other columns than the copy")
        if isinstance(event, Truncate):
            self.rows.clear()
        elif isinstance(event, Insert):
            self._insert(event)
        elif isinstance(event, Delete):
            self.remove(self._old_place(event))
        else:
            self._update(event)
        self.mark = at

    def _insert(self, event: Insert) -> None:
        if UNCHANGED in event.new:
            raise _refused("an INSERT came without one of its values")
        if getattr(event.schema.table_schema, "strict_inserts", False) and self.place(event.new) in self.rows:
            raise _refused("an INSERT met a key that exists")
        self.add(event.new)

    def _update(self, event: Update) -> None:
        if event.schema.insert_only:
            raise _refused("an UPDATE came for a table without identity")
        before = self.remove(self._old_place(event) if event.old is not None else self.place(event.new))
        known = event.old if event.old is not None and _is_full(event) else before
        new = event.new
        if UNCHANGED in new:
            if known is None:
                raise _refused("an UPDATE refers to a value that is not there")
            new = tuple(old if value is UNCHANGED else value for value, old in zip(new, known, strict=True))
        self.add(new)

    def _old_place(self, event: Update | Delete) -> str:
        old = event.old
        assert old is not None
        if event.schema.insert_only:
            raise _refused("a change of a row came for a table without identity")
        if any(old[i] is None for i in self.key):
            raise _refused("an old tuple came without its key")
        if not self.key and not _is_full(event):
            raise _refused("an old tuple came that is not whole, for a table without key")
        return self.place(old)


def _is_full(event: Update | Delete) -> bool:
    return not event.old_is_key and getattr(event.schema.table_schema, "old_is_full", True)


def _refused(why: str) -> DestinationError:
    return DestinationError(why, detail="the model refuses what cannot be", hint="Copy it again.", retry=Retry.TIMED)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that was made: under which name, and of which table. The first one of a table needs no reason."""

    name: TableName
    table: TableId


class ModelDestination(Destination):
    """Tables by oid, and which oid was copied last under a name. Outlives a pipeline's runs, as a lake does."""

    def __init__(self) -> None:
        self.tables: dict[TableId, ModelTable] = {}
        self.names: dict[TableName, TableId] = {}
        self.copies: list[Copy] = []
        self.refused: list[tuple[TableName, str]] = []
        """Changes that cannot be, by what was wrong with them: the engine should have known."""
        self._lock = threading.Lock()

    @classmethod
    def name(cls) -> str:
        return "model"

    def start(self, context: RunContext) -> None:
        self.context = context

    def furthest_position(self, table_ids: Sequence[TableId]) -> EndLsn | None:
        with self._lock:
            marks = [self.tables[table].mark for table in table_ids if table in self.tables]
            return max((EndLsn(lsn + (ordinal >= 0)) for lsn, ordinal in marks), default=None)

    def drop_table_for_copy(
        self, replicated_table_schema: ReplicatedTableSchema, result: DropTableForCopyResult
    ) -> None:
        result.done()

    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        table = ModelTable.of(replicated_table_schema)
        try:
            for row in table_rows.rows():
                assert not table.key or table.place(row) not in table.rows, "a key was copied twice"
                table.add(row)
        except DestinationError as error:
            result.failed(error)
            return
        table.mark = (table_rows.start_lsn.value, -1)
        with self._lock:
            self.tables[replicated_table_schema.id] = table
            self.names[replicated_table_schema.name] = replicated_table_schema.id
            self.copies.append(Copy(replicated_table_schema.name, replicated_table_schema.id))
        result.done()

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        failed: dict[TableId, Exception] = {}
        with self._lock:
            for event in events.events():
                if isinstance(event, Insert | Update | Delete | Truncate) and event.schema.id not in failed:
                    try:
                        self.tables[event.schema.id].apply(event)
                    except DestinationError as error:
                        failed[event.schema.id] = error
                        self.refused.append((event.schema.name, error.message))
        if failed:
            result.failed_tables(failed)
        else:
            result.done()

    def read(self, schema: ReplicatedTableSchema) -> Iterator[pa.RecordBatch]:
        """What stands under the table's name; a column that is missing or one too many is an error, as in a lake."""
        with self._lock:
            if schema.name not in self.names:
                raise LookupError(f"{schema.name} was never copied")
            table = self.tables[self.names[schema.name]]
            wanted = arrow_schema(schema)
            if sorted(table.columns) != sorted(wanted.names):
                raise LookupError(f"{schema.name} has the columns {table.columns}, the source has {wanted.names}")
            rows = [row for found in table.rows.values() for row in found]
        columns = [[row[table.columns.index(name)] for row in rows] for name in wanted.names]
        arrays = [pa.array(values, field.type) for values, field in zip(columns, wanted, strict=True)]
        yield pa.record_batch(arrays, schema=wanted)
