"""Names with quotes, spaces, capitals, dots, slashes, unicode and 63 bytes, in a whole pipeline and in every command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from psycopg import sql
from pyspark.sql import SparkSession

from headwater.schema.table import TableName
from headwater.store.postgres import PostgresStore
from tests.commands import headwater, write_settings
from tests.conftest import Database
from tests.integration.lake_pipeline import running_into_lake
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS

PUBLICATION = 'Ünser "Pub", it\'s `the` $one'
LONG = "Ä" * 30 + "x"
"""61 bytes, and what is appended makes 63, the most that Postgres keeps."""
NAMES = [
    TableName('Sch "ema" ü.x', 'Tab "le", it\'s `one` $x'),
    TableName('Sch "ema" ü.x', "orders"),
    TableName('Sch "ema" ü.x', "Orders"),
    TableName("select", "a.b.c"),
    TableName("select", " leading and trailing "),
    TableName("select", "per%cent ?and #hash \\back *star :colon"),
    # Three that a dot makes one of, and each means itself.
    TableName("select.a", "b.c"),
    TableName("select.a.b", "c"),
    TableName("Ö" * 31 + "y", f"{LONG}-1"),
    TableName("Ö" * 31 + "y", f"{LONG}-2"),
]
COLUMNS = [
    'Col "umn" ü.x, it\'s `one` $x',
    "Id",
    "ID",
    " ",
    "a.b",
    "order",
    f"{LONG}-1",
    f"{LONG}-2",
    "headwater_deleted",
]


@pytest.fixture
def named(database: Database) -> Database:
    key, *others = map(sql.Identifier, COLUMNS)
    listed = sql.SQL(", ").join(sql.SQL("{} text").format(column) for column in others)
    for namespace in dict.fromkeys(name.namespace for name in NAMES):
        database.execute(sql.SQL("create schema {}").format(sql.Identifier(namespace)))
    tables = [sql.Identifier(name.namespace, name.name) for name in NAMES]
    for table in tables:
        database.execute(sql.SQL("create table {} ({} int primary key, {})").format(table, key, listed))
        values = sql.SQL(", ").join(sql.Literal(f"{i}: {column}") for i, column in enumerate(COLUMNS[1:]))
        database.execute(sql.SQL("insert into {} select i, {} from generate_series(1, 3) i").format(table, values))
    database.execute(
        sql.SQL("create publication {} for table {}").format(sql.Identifier(PUBLICATION), sql.SQL(", ").join(tables))
    )
    return database


def change(database: Database) -> None:
    """An update, a changed key, a delete and an insert in each table."""
    key, one = sql.Identifier(COLUMNS[0]), sql.Identifier(COLUMNS[-2])
    for name in NAMES:
        table = sql.Identifier(name.namespace, name.name)
        database.execute(
            sql.SQL(
                "update {table} set {one} = 'changed' where {key} = 1; update {table} set {key} = 10 where {key} = 2; "
                "delete from {table} where {key} = 3; insert into {table} ({key}, {one}) values (4, 'new')"
            ).format(table=table, key=key, one=one)
        )


def written(name: TableName) -> str:
    """As a person writes it, and as it is shown."""
    return name.quoted if str(name) == "select.a.b.c" else str(name)


@pytest.mark.promise("names with quotes, spaces, capitals, unicode and 63 bytes")
def test_names_with_quotes_spaces_capitals_unicode_and_63_bytes_work_in_a_pipeline_and_in_every_command(
    named: Database, spark: SparkSession, tmp_path: Path
) -> None:
    assert max(len(name.name.encode()) for name in NAMES) == 63
    assert max(len(column.encode()) for column in COLUMNS) == 63
    file = write_settings(named, tmp_path, publication=PUBLICATION)
    store = PostgresStore(named.settings, 1)
    with running_into_lake(named, spark, tmp_path, store, publication=PUBLICATION) as run:
        run.wait_ready(len(NAMES))
        change(named)
        run.wait_caught_up()
        run.assert_equal(*NAMES)
        said = headwater("tables", file)
        for name in NAMES:
            assert f"{written(name)}: ready 0/" in said
        wanted = [NAMES[0], NAMES[4], NAMES[6], NAMES[9]]
        copied = {name: run.snapshots(name) for name in wanted}
        assert "4 tables are copied again now" in headwater("resync", file, *map(written, wanted))
        run.wait_for(lambda: all(run.snapshots(name) > count for name, count in copied.items()))
        run.wait_ready(len(NAMES))
        run.assert_equal(*NAMES)
        refused = headwater("rollback", file, written(NAMES[0]), status=1)
        assert f"error: table {NAMES[0]} did not stop with an error" in refused
        (hint,) = (line for line in refused.splitlines() if line.startswith("hint: "))
        assert shlex.split(hint)[-4:] == ["headwater", "resync", str(file), str(NAMES[0])]
        run.stop()
    assert headwater("remove", file, "--yes").startswith("dropped headwater_apply_1\ndeleted its state")
