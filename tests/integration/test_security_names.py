"""Names that Spark, SQL, a shell or a terminal would read as more than a name, in every kind of name and every kind of write.

A name of the source is data: it means itself, and nothing of this process's environment gets into the lake.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import sql
from pyspark.sql import SparkSession

from headwater.config import DestinationConfig, SparkConfig
from headwater.destinations.iceberg.warehouse import prepare_warehouse, spark_catalog
from headwater.errors import ConfigError, DestinationError, Retry
from headwater.events import OLD_FULL, UNCHANGED
from headwater.schema.table import ReplicaIdentity, ReplicatedTableSchema, SnapshotId, TableName
from headwater.secret import Secret
from headwater.spark import sql_text
from headwater.spark.session import session_config
from headwater.spark.sql_text import SQL_TEXT, SUBSTITUTE
from headwater.store.memory import MemoryStore
from headwater.testing.lake_rows import open_lake
from tests.conftest import Database
from tests.integration.lake_destination import ID_V, Lake, change_run, delete, insert, table_schema, truncate, update
from tests.integration.lake_pipeline import running_into_lake
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS

NAMES = {
    "a variable": "sh${x}op",
    "the environment": "c${env:HOME}d",
    "a system property": "c${system:user.home}d",
    "half a variable": "${",
    "the other half": "}",
    "quotes": "a'b\"c",
    "backticks": "a`b``c",
    "backslashes": "a\\b\\",
    "a newline": "a\nb\r\nc",
    "control characters": "a\x01\x07\x1b[31m\x7f\x85b",
    "bidi": "a\u202eb\u2066c",
    "a comment": "a -- b /* c",
    "a regular expression": "(id)?+.+",
}
LONG = {what: (name * 63).encode()[:63].decode(errors="ignore") for what, name in NAMES.items()}


@pytest.fixture(params=["ours", "given"])
def any_lake(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    """With a session that we made, and with one that somebody gave us, in which names are read as regular expressions too."""
    settings = DestinationConfig(warehouse=str(tmp_path / "lake"))
    prepare_warehouse(settings)
    session = spark.newSession()
    for key, value in spark_catalog(settings).items():
        if key != "spark.sql.extensions":
            session.conf.set(key, value)
    for key, value in SQL_TEXT.items():
        session.conf.set(key, value if request.param == "ours" else "true")
    made = Lake(session, settings)
    yield made
    made.destination.shutdown()


KEY, VALUES = tuple(NAMES.values()), tuple(LONG.values())


def row(number: int, *values: object) -> tuple[object, ...]:
    """A row of a table with all names as columns: the number in each column of the key, the values in turn in the others."""
    return (number,) * len(KEY) + tuple(values[i % len(values)] for i in range(len(VALUES)))


def in_lake(warehouse: Path) -> set[tuple[str, str]]:
    """Every table of the catalog, as the catalog's own file has it."""
    with closing(sqlite3.connect(warehouse / "catalog.db")) as catalog:
        return set(catalog.execute("select table_namespace, table_name from iceberg_tables"))


def test_every_name_of_a_namespace_and_a_table_means_itself_in_every_kind_of_write(
    any_lake: Lake, tmp_path: Path
) -> None:
    names = [TableName(NAMES[what], LONG[what]) for what in NAMES]
    schemas = [table_schema(*ID_V, name=name) for name in names]
    for schema in schemas:
        any_lake.copy(schema, [(1, "a"), (2, "b")])
    any_lake.write(*(change_run(schema, 200, update(1, "c"), delete(2, None), insert(3, "d")) for schema in schemas))
    assert all(any_lake.rows(schema) == [(1, "c"), (3, "d")] for schema in schemas)
    any_lake.write(*(truncate(schema, 300) for schema in schemas))
    assert all(any_lake.rows(schema) == [] for schema in schemas)
    assert not any_lake.destination.missing_tables([schema.id for schema in schemas])
    assert all(any_lake.destination._lake_works(schema.id) for schema in schemas[:3])
    any_lake.destination.shutdown()
    any_lake.store = MemoryStore()
    any_lake.start("7002")
    for schema in schemas[:3]:
        with pytest.raises(DestinationError, match="did not write"):
            any_lake.copy(schema, [(1, "x")], epoch="e2")
        any_lake.copy(schema, [(1, "x")], epoch="e2", take_over=True)
        assert any_lake.rows(schema) == [(1, "x")]
    assert in_lake(tmp_path / "lake") == {(name.namespace, name.name) for name in names}
    reader = open_lake(tmp_path / "lake")
    for name in names:
        assert reader.load_table((name.namespace, name.name)).properties["headwater.source-table"] == str(name)


def test_every_name_of_a_column_means_itself_in_every_kind_of_write(any_lake: Lake, tmp_path: Path) -> None:
    columns = [*((name, 20) for name in KEY), *((name, 25) for name in VALUES)]
    schema = table_schema(*columns, key=KEY, name=TableName("shop", "keyed"))
    any_lake.copy(schema, [row(number, "a", "b") for number in (1, 2, 3)])
    any_lake.write(
        change_run(schema, 200, insert(*row(4, "new", None)), update(*row(1, "c", UNCHANGED)), delete(*row(2, None)))
    )
    assert any_lake.rows(schema) == [row(1, "c", "b"), row(3, "a", "b"), row(4, "new", None)]
    any_lake.source = {(5,) * len(KEY): row(5, "now", "read")}
    any_lake.write(change_run(schema, 300, insert(*row(5, "now", UNCHANGED))))
    assert row(5, "now", "read") in any_lake.rows(schema)
    any_lake.write(truncate(schema, 400), change_run(schema, 400, insert(*row(6, "kept")), first=1))
    assert any_lake.rows(schema) == [row(6, "kept")]
    schema = renamed(any_lake, schema)
    without_key = table_schema(*columns, key=(), name=TableName("shop", "all"), replica_identity=ReplicaIdentity.FULL)
    any_lake.copy(without_key, [row(1, "a"), row(1, "a"), row(2, "b")])
    changes = (delete(*row(1, "a"), kind=OLD_FULL), update(*row(2, "c"), old=row(2, "b"), kind=OLD_FULL))
    any_lake.write(change_run(without_key, 200, *changes))
    assert any_lake.rows(without_key) == [row(1, "a"), row(2, "c")]
    reader = open_lake(tmp_path / "lake")
    for written in (schema, without_key):
        table = reader.load_table((written.name.namespace, written.name.name))
        assert [field.name for field in table.schema().fields] == [column.name for column in written.columns]
        said = Path(table.metadata_location.removeprefix("file:")).read_text()
        assert f"c{os.environ['HOME']}d" not in said


def renamed(lake: Lake, schema: ReplicatedTableSchema) -> ReplicatedTableSchema:
    """All columns but the key's change their names, each for the beginning of the next one's."""
    key, others = schema.columns[: len(KEY)], schema.columns[len(KEY) :]
    names = [f"{i}{others[(i + 1) % len(others)].name[:40]}" for i in range(len(others))]
    columns = (*key, *(replace(other, name=name) for other, name in zip(others, names, strict=True)))
    made = ReplicatedTableSchema(replace(schema.table_schema, columns=columns, snapshot_id=SnapshotId(450)))
    lake.store.store_table_schema(made.table_schema)
    lake.write(change_run(made, 500, insert(*row(7, "more"))))
    assert lake.rows(made) == [row(6, "kept"), row(7, "more")]
    return made


def test_a_schema_whose_name_becomes_anothers_by_substitution_replaces_none_of_its_rows(any_lake: Lake) -> None:
    shop = table_schema(("id", 20), ("v", 25), name=TableName("shop", "orders"))
    forged = table_schema(("id", 20), ("v", 25), name=TableName("sh${x}op", "orders"))
    any_lake.copy(shop, [(1, "the shop's")])
    any_lake.copy(forged, [(1, "forged")], take_over=True)
    any_lake.write(change_run(forged, 200, update(1, "again")))
    assert any_lake.rows(shop) == [(1, "the shop's")]
    assert any_lake.rows(forged) == [(1, "again")]


def test_the_users_own_settings_do_not_switch_substitution_on() -> None:
    config = session_config(SparkConfig(conf={SUBSTITUTE: Secret("true")}), {SUBSTITUTE: "true"})
    assert config[SUBSTITUTE] == "false"


def test_where_substitution_cannot_be_switched_off_such_names_are_refused_and_others_are_written(
    any_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = table_schema(("id", 20), ("v", 25), name=TableName("shop", "orders"))
    schema = table_schema(("id", 20), ("v${env:HOME}", 25), name=TableName("shop", "notes"))
    any_lake.copy(schema, [(1, "a")])
    # As in a session whose platform keeps the setting for itself.
    monkeypatch.setattr(sql_text, "switch_off", lambda session: None)
    any_lake.spark.conf.set(SUBSTITUTE, "true")
    any_lake.copy(plain, [(1, "a")])
    with pytest.raises(DestinationError, match=r"Spark would replace part of the name") as raised:
        any_lake.copy(schema, [(1, "b")], epoch="e2")
    assert SUBSTITUTE in raised.value.detail
    assert raised.value.hint
    assert raised.value.retry is Retry.MANUAL
    with pytest.raises(DestinationError, match=r"Spark would replace part of the name"):
        any_lake.write(change_run(schema, 200, update(1, "c")))
    any_lake.spark.conf.set(SUBSTITUTE, "false")
    assert any_lake.rows(schema) == [(1, "a")]


def test_a_pipeline_follows_tables_whose_names_and_publication_spark_would_substitute(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    publication = "p${env:HOME}'\n`"
    tables = [
        TableName("sh${x}op", "orders"),
        TableName("shop", "orders"),
        TableName("shop", "a\n\x1b[31m`${env:HOME}"),
    ]
    for namespace in ("shop", "sh${x}op"):
        database.execute(sql.SQL("create schema {}").format(sql.Identifier(namespace)))
    for number, name in enumerate(tables):
        database.execute(
            sql.SQL("create table {table} ({key} int primary key, {value} text)").format(
                table=sql.Identifier(name.namespace, name.name),
                key=sql.Identifier("${x}id\n"),
                value=sql.Identifier("c${env:HOME}d"),
            )
        )
        database.execute(
            sql.SQL("insert into {} select i, {} from generate_series(1, 5) i").format(
                sql.Identifier(name.namespace, name.name), sql.Literal(str(number))
            )
        )
    listed = sql.SQL(", ").join(sql.Identifier(name.namespace, name.name) for name in tables)
    database.execute(sql.SQL("create publication {} for table {}").format(sql.Identifier(publication), listed))
    with running_into_lake(database, spark, tmp_path, publication=publication) as followed:
        followed.wait_ready(len(tables))
        for name in tables:
            table, key = sql.Identifier(name.namespace, name.name), sql.Identifier("${x}id\n")
            database.execute(
                sql.SQL(
                    "update {table} set {key} = 10 where {key} = 1; delete from {table} where {key} = 2;"
                    "truncate {table}; insert into {table} values (3, 'new')"
                ).format(table=table, key=key)
            )
        followed.wait_caught_up(120)
        followed.assert_equal(*tables)
        followed.stop()


@pytest.mark.parametrize("odd", ["a%20b", "h#h", "q?q", "a*b", "a[b]", "sh${x}op", "back\\slash"])
def test_a_warehouse_whose_path_is_read_as_more_than_a_path_is_refused(tmp_path: Path, odd: str) -> None:
    """Its catalog would be made in another directory, or its rows not be found."""
    with pytest.raises(ConfigError, match=r"destination\.warehouse") as raised:
        prepare_warehouse(DestinationConfig(warehouse=str(tmp_path / odd)))
    assert any(f" {character} " in f" {raised.value.detail} " for character in odd)
    assert raised.value.hint
    assert not (tmp_path / odd).exists()


@pytest.mark.parametrize("odd", ["a b", "q'q", 'q"q', "b`b", "a\nb", "a\x1bb", "c:d", "a$x", "ü"])
def test_a_warehouse_of_any_other_path_works(spark: SparkSession, tmp_path: Path, odd: str) -> None:
    settings = DestinationConfig(warehouse=str(tmp_path / odd))
    prepare_warehouse(settings)
    session = spark.newSession()
    for key, value in spark_catalog(settings).items():
        if key != "spark.sql.extensions":
            session.conf.set(key, value)
    lake = Lake(session, settings)
    schema = table_schema(("id", 20), ("v", 25))
    rows = [(number, "x" * 100) for number in range(10_000)]
    lake.copy(schema, rows)
    # As many as go through the spool.
    lake.write(change_run(schema, 200, *(update(number, "y" * 100) for number, _ in rows)))
    assert lake.rows(schema)[0] == (0, "y" * 100)
    lake.destination.shutdown()
    assert (tmp_path / odd / "catalog.db").is_file()
