"""Values that a change refers to and that neither the stream nor the lake has: read in the source, later than the change was
made. Whatever happened to the row in between, its value is not taken for another row's (invariant 12)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headwater.contracts.destination import RunContext
from headwater.contracts.results import WriteTableRowsResult
from headwater.destinations.iceberg.destination import IcebergDestination
from headwater.engine.follow import read_on
from headwater.events import SourceRead, TableRows
from headwater.schema.table import ReplicatedTableSchema
from headwater.testing.lake_rows import open_lake
from tests.conftest import Database
from tests.integration.lake_pipeline import RunningIntoLake, running_into_lake
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = [*PYSPARK_SOCKETS, pytest.mark.invariant(12)]

MOVES = {
    "moved": "update notes set id = 1002 where id = 2",
    "deleted": "delete from notes where id = 2",
    "filtered out again": "update notes set shown = false where id = 2",
    "moved and its key taken": "update notes set id = 1002 where id = 2; insert into notes values (2, true, 0, 'another')",
    "deleted and its key taken": "delete from notes where id = 2; insert into notes values (2, true, 0, 'another')",
    "back elsewhere": "update notes set shown = false where id = 2; update notes set id = 7, shown = true where id = 2;"
    "insert into notes values (2, true, 0, 'another')",
    "written again": "update notes set n = n + 1 where id = 2",
    "another value": "update notes set big = repeat('other', 2000) where id = 2",
    "two rows that change places": "update notes set id = 1002 where id = 2; update notes set id = 2 where id = 1;"
    "update notes set id = 1 where id = 1002",
}


class SourceMovesOn(IcebergDestination):
    """Before each of its reads of rows in the source, and after the copy, something is changed there."""

    database: ClassVar[Database]
    before_read: ClassVar[Iterator[str]]
    after_copy: ClassVar[str | None]

    def start(self, context: RunContext) -> None:
        database, statements = SourceMovesOn.database, SourceMovesOn.before_read

        def read(schema: ReplicatedTableSchema, keys: pa.Table) -> SourceRead:
            for statement in statements:
                database.execute(statement)
                break
            return context.read_source_rows(schema, keys)

        super().start(replace(context, read_source_rows=read))

    def write_table_rows(self, schema: ReplicatedTableSchema, rows: TableRows, result: WriteTableRowsResult) -> None:
        super().write_table_rows(schema, rows, result)
        statement, SourceMovesOn.after_copy = SourceMovesOn.after_copy, None
        if statement is not None:
            self.database.execute(statement)


@pytest.fixture
def run(database: Database, spark: SparkSession, tmp_path: Path) -> Callable[..., Any]:
    """A table with a row filter, which makes an INSERT of an UPDATE, with a large value that did not change and is not sent."""
    database.execute(
        """
        create table notes(id int, shown bool not null, n int, big text);
        alter table notes alter column big set storage external;
        insert into notes select i, i % 2 = 1, 0, repeat('x' || i, 2000) from generate_series(1, 6) i;
        create unique index notes_shown on notes(id, shown);
        alter table notes alter id set not null, replica identity using index notes_shown;
        create publication shop for table notes where (shown);
        """
    )

    def start(*before_read: str, after_copy: str | None = None) -> Any:
        SourceMovesOn.database, SourceMovesOn.after_copy = database, after_copy
        SourceMovesOn.before_read = iter(before_read)
        return running_into_lake(database, spark, tmp_path, destination=SourceMovesOn)

    return start


def assert_equal(run: RunningIntoLake, database: Database, copies: int = 1) -> None:
    run.wait_caught_up()
    run.wait_ready(1)
    shown = {row[0]: row[1:] for row in database.execute("select id, n, big from notes where shown")}
    table = open_lake(run.warehouse).load_table(("public", "notes"))
    assert {row["id"]: (row["n"], row["big"]) for row in table.scan().to_arrow().to_pylist()} == shown
    epochs = {s.summary["headwater.epoch"] for s in table.snapshots() if s.summary is not None}
    assert len(epochs - {None}) == copies  # the table is made with a commit that is empty


@pytest.mark.parametrize("statement", MOVES.values(), ids=MOVES.keys())
def test_what_became_of_the_row_before_it_was_read_is_learnt_from_the_stream(
    run: Callable[..., Any], database: Database, statement: str
) -> None:
    with run(statement) as running:
        running.wait_ready(1)
        database.execute("update notes set shown = true where id = 2")
        assert_equal(running, database)


@pytest.mark.parametrize("statement", MOVES.values(), ids=MOVES.keys())
def test_the_same_while_a_copy_catches_up(run: Callable[..., Any], database: Database, statement: str) -> None:
    with run(statement, after_copy="update notes set shown = true where id = 2") as running:
        assert_equal(running, database)


def test_a_row_that_was_written_under_a_savepoint_and_again_and_again_is_distinguished(
    run: Callable[..., Any], database: Database
) -> None:
    """Its transaction's number is not in the row; what is written meanwhile leaves the value as it was."""
    busy = ["update notes set n = n + 1 where id = 2"] * 3
    with run(*busy) as running:
        running.wait_ready(1)
        database.execute("begin; savepoint a; update notes set shown = true where id = 2; commit")
        assert_equal(running, database)


def test_a_row_that_never_rests_has_its_table_copied_again(
    run: Callable[..., Any], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_on, "_TIMES", 2)
    moves = [f"update notes set id = {100 + i} where id = {100 + i - 1 if i else 2}" for i in range(4)]
    with run(*moves) as running:
        running.wait_ready(1)
        database.execute("update notes set shown = true where id = 2")
        assert_equal(running, database, copies=2)


def test_a_table_that_cannot_be_read_any_more_holds_up_no_other(run: Callable[..., Any], database: Database) -> None:
    database.execute("create table other(id int primary key); alter publication shop add table other")
    with run("alter table notes rename big to large") as running:
        running.wait_ready(2)
        database.execute("update notes set shown = true where id = 2; insert into other values (1)")
        running.wait_caught_up()
        running.wait_ready(2)
        running.assert_equal("other")
        rows = open_lake(running.warehouse).load_table(("public", "notes")).scan().to_arrow().to_pylist()
        assert {row["id"]: row["large"] for row in rows} == dict(
            database.execute("select id, large from notes where shown")
        )
