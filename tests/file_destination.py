"""A destination that writes to a file, which outlives the process, and a check that every change took effect once.

A key counts 1, 2, 3, 4, is deleted, comes back as 6, 7, 8 and so on: one step a change. The file keeps every change that took
effect, so the steps show what was skipped, doubled or put in another order, and the rows show what is there in the end.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from headwater.contracts.destination import Destination, RunContext
from headwater.contracts.results import DropTableForCopyResult, WriteEventsResult, WriteTableRowsResult
from headwater.events import Delete, EventBatch, Insert, TableRows, Truncate, Update
from headwater.schema.table import ReplicatedTableSchema
from tests.conftest import Database

_TABLES = """
create table if not exists copies(name text primary key, epoch text, lsn int, ordinal int, number int);
create table if not exists rows(name text, id int, row text, primary key (name, id));
create table if not exists copied(name text, number int, id int, counter int, primary key (name, number, id));
create table if not exists changes(
    name text, number int, lsn int, ordinal int, id int, counter int, primary key (name, number, lsn, ordinal)
);
"""


class FileDestination(Destination):
    """Tables whose first column is the key and whose second is the counter. One file transaction a table and batch."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.after_table: Callable[[str], None] = lambda name: None
        """Called when a table's part of a copy or a batch is durable."""
        self.before_batch: Callable[[EventBatch], None] = lambda batch: None
        self.after_batch: Callable[[EventBatch], None] = lambda batch: None
        with self._open() as file:
            file.executescript(_TABLES)

    @classmethod
    def name(cls) -> str:
        return "file"

    def start(self, context: RunContext) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def drop_table_for_copy(
        self, replicated_table_schema: ReplicatedTableSchema, result: DropTableForCopyResult
    ) -> None:
        result.done()

    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        name = replicated_table_schema.name.name
        rows = list(table_rows.rows())
        with self._open() as file:
            found = file.execute("select number from copies where name = ?", [name]).fetchone()
            number = (found[0] if found is not None else 0) + 1
            file.execute(
                "insert or replace into copies values (?, ?, ?, -1, ?)",
                [name, table_rows.epoch, table_rows.start_lsn.value, number],
            )
            file.execute("delete from rows where name = ?", [name])
            file.executemany("insert into rows values (?, ?, ?)", [(name, row[0], _text(row)) for row in rows])
            file.executemany("insert into copied values (?, ?, ?, ?)", [(name, number, row[0], row[1]) for row in rows])
        self.after_table(name)
        result.done()

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        self.before_batch(events)
        by_table: dict[str, list[Insert | Update | Delete | Truncate]] = {}
        for event in events.events():
            if isinstance(event, (Insert, Update, Delete, Truncate)):
                by_table.setdefault(event.schema.name.name, []).append(event)
        for name, changes in sorted(by_table.items()):
            with self._open() as file:
                for change in changes:
                    _apply(file, name, change)
            self.after_table(name)
        self.after_batch(events)
        result.done()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it is durable when the block ends."""
        with self._lock:
            file = sqlite3.connect(self._path, timeout=30)
            try:
                with file:
                    yield file
            finally:
                file.close()

    # What the tests ask

    def rows(self, name: str) -> dict[int, tuple[Any, ...]]:
        with self._open() as file:
            found = file.execute("select id, row from rows where name = ?", [name]).fetchall()
        return {id: tuple(json.loads(row)) for id, row in found}

    def copies(self, name: str) -> int:
        with self._open() as file:
            found = file.execute("select number from copies where name = ?", [name]).fetchone()
        return int(found[0]) if found is not None else 0

    def assert_equal(self, database: Database, *names: str) -> None:
        for name in names:
            assert self.rows(name) == {row[0]: row for row in database.execute(f"select * from {name}")}

    def assert_every_step_once(self, *names: str) -> None:
        """From each copy on, every key went on step by step."""
        for name in names:
            with self._open() as file:
                copied = file.execute("select number, id, counter from copied where name = ?", [name]).fetchall()
                changes = file.execute(
                    "select number, id, counter from changes where name = ? order by number, lsn, ordinal", [name]
                ).fetchall()
            steps = {(number, id): counter for number, id, counter in copied}
            for number, id, counter in changes:
                before = steps.get((number, id))
                if before is None:
                    # Not in the copy: new, or back after a delete that came before it.
                    assert counter == 1 or counter % 8 == 6, (name, number, id, counter)
                else:
                    wanted = before + 1
                    assert (counter is None) == (wanted % 8 == 5), (name, number, id, before, counter)
                    assert counter in (None, wanted), (name, number, id, before, counter)
                    counter = wanted
                steps[(number, id)] = counter


def _apply(file: sqlite3.Connection, name: str, change: Insert | Update | Delete | Truncate) -> None:
    lsn, ordinal, number = file.execute("select lsn, ordinal, number from copies where name = ?", [name]).fetchone()
    at = (change.commit_lsn.value, change.ordinal)
    if at <= (lsn, ordinal):
        return
    file.execute("update copies set lsn = ?, ordinal = ? where name = ?", [*at, name])
    assert not isinstance(change, Truncate)
    old = change.old if isinstance(change, (Update, Delete)) else None
    new = change.new if isinstance(change, (Insert, Update)) else None
    gone = old if old is not None else new
    assert gone is not None
    file.execute("delete from rows where name = ? and id = ?", [name, gone[0]])
    if new is not None:
        file.execute("insert or replace into rows values (?, ?, ?)", [name, new[0], _text(new)])
    id, counter = (new[0], new[1]) if new is not None else (gone[0], None)
    file.execute("insert into changes values (?, ?, ?, ?, ?, ?)", [name, number, *at, id, counter])


def _text(row: tuple[Any, ...]) -> str:
    return json.dumps(row, default=str)


class CounterChanges:
    """Makes the next changes of some tables' counters; give it to `writing_by`."""

    KEYS = 12

    def __init__(self, *tables: str) -> None:
        self._tables = tables
        self._counters: dict[tuple[str, int], int] = {}

    def __call__(self, connection: psycopg.Connection[tuple[Any, ...]], turn: int) -> None:
        with connection.transaction():
            for table in self._tables:
                # The same key twice in one transaction now and then.
                for id in (turn % self.KEYS, turn * 7 % self.KEYS):
                    self._step(connection, table, id)

    def _step(self, connection: psycopg.Connection[tuple[Any, ...]], table: str, id: int) -> None:
        counter = self._counters[(table, id)] = self._counters.get((table, id), 0) + 1
        if counter == 1 or counter % 8 == 6:
            statement = "insert into {} (counter, id) values (%s, %s)"
        elif counter % 8 == 5:
            statement = "delete from {} where counter + 1 = %s and id = %s"
        else:
            statement = "update {} set counter = %s where id = %s"
        done = connection.execute(statement.format(table), [counter, id])
        assert done.rowcount == 1, (statement, counter, id)
