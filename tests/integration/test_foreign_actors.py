"""Others act in the lake: they compact, expire, roll back, drop and lose. A table ends equal, or fails and says so, alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyiceberg.catalog import Catalog
from pyspark.sql import SparkSession

from headwater.config import DestinationConfig
from headwater.destinations.iceberg.warehouse import spark_catalog
from headwater.schema.table import TableName
from headwater.testing.compare import compare_table
from headwater.testing.lake_rows import open_lake
from headwater.testing.postgres import PostgresServer
from tests.conftest import Database, fresh_database
from tests.integration.catalog_lake import LakeRun, lake_run
from tests.integration.lake_pipeline import EXTENSIONS
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS
from tests.integration.run_after_call import run_after_call

pytestmark = PYSPARK_SOCKETS

ORDERS, ITEMS = TableName("public", "orders"), TableName("public", "items")
SHOP = [
    "create table orders(id int primary key, n int, note text)",
    "insert into orders select i, i, 'o' from generate_series(1, 50) i",
    "create table items(id int primary key, n int, note text)",
    "insert into items select i, i, 'i' from generate_series(1, 50) i",
    "create publication shop for table orders, items",
]
LARGE = "alter table orders alter note set storage external; update orders set note = repeat('x', 9000)"


def change(run: LakeRun, by: int) -> None:
    """Updates, deletes and inserts in both tables, as two transactions."""
    for table in ("orders", "items"):
        run.execute(
            f"update {table} set n = n + {by} where id % 3 = 0; delete from {table} where id = {by};"
            f" insert into {table} values ({1000 + by}, 0, 'new')"
        )


class Lake:
    """The lake in the hands of another program: Spark SQL with a session of its own, or the files themselves."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._warehouse = directory / "lake"
        self._session = spark.newSession()
        for key, value in spark_catalog(DestinationConfig(warehouse=str(self._warehouse))).items():
            if key != EXTENSIONS:
                self._session.conf.set(key, value)

    @property
    def catalog(self) -> Catalog:
        return open_lake(self._warehouse)

    def sql(self, statement: str) -> None:
        self._session.sql(statement).collect()

    def snapshots(self) -> list[int]:
        return [snapshot.snapshot_id for snapshot in self.catalog.load_table(("public", "orders")).snapshots()]


def compact_and_expire(lake: Lake) -> None:
    lake.sql("call lake.system.rewrite_data_files(table => 'public.orders', options => map('rewrite-all', 'true'))")
    lake.sql("call lake.system.rewrite_manifests(table => 'public.orders')")
    lake.sql(
        "call lake.system.expire_snapshots(table => 'public.orders', retain_last => 1,"
        " older_than => timestamp '2100-01-01 00:00:00')"
    )
    lake.sql("call lake.system.remove_orphan_files(table => 'public.orders')")


def lose_a_data_file(lake: Lake) -> None:
    files = lake.catalog.load_table(("public", "orders")).inspect.data_files()["file_path"].to_pylist()
    Path("/" + max(files).removeprefix("file:").lstrip("/")).unlink()


def drop_a_column(lake: Lake) -> None:
    lake.sql("alter table lake.public.orders drop column note")


def roll_back(lake: Lake) -> None:
    first = lake.snapshots()[0]
    lake.sql(f"call lake.system.rollback_to_snapshot('public.orders', {first})")


def drop_the_table(lake: Lake) -> None:
    lake.sql("drop table lake.public.orders")


def replace_the_table(lake: Lake) -> None:
    lake.sql("drop table lake.public.orders")
    lake.sql("create table lake.public.orders (id int, n int, note string) using iceberg")


ACTORS: list[Callable[[Lake], None]] = [
    compact_and_expire,
    lose_a_data_file,
    drop_a_column,
    roll_back,
    drop_the_table,
    replace_the_table,
]


SEEN_AT_START = {compact_and_expire, roll_back, drop_the_table, replace_the_table}
"""What a run finds before any change comes, because it looks at every table and its watermark when it starts."""


def assert_equal_or_loud(run: LakeRun, allowed: TableName | None) -> None:
    """All tables are equal, but the one that may have failed: that one says what to do."""
    differences, failures = run.differences(), run.failures()
    for table, difference in differences.items():
        assert table == allowed, difference
        assert table in failures, f"it is wrong and ready: {difference}"
        assert failures[table].solution, f"it does not say what to do: {difference}"


@pytest.mark.invariant(15)
@pytest.mark.parametrize("moment", ["while_running", "while_stopped"])
@pytest.mark.parametrize("act", ACTORS, ids=lambda act: act.__name__)
def test_a_table_that_another_program_changed_in_the_lake_ends_equal_or_fails_alone(
    database: Database, spark: SparkSession, tmp_path: Path, act: Callable[[Lake], None], moment: str
) -> None:
    allowed = None if act is compact_and_expire else ORDERS
    with lake_run(database, spark, tmp_path, SHOP) as run:
        run.start()
        run.wait_settled()
        change(run, 1)
        run.barrier()
        change(run, 2)
        run.barrier()
        if moment == "while_stopped":
            run.stop()
        act(Lake(spark, tmp_path))
        if moment == "while_stopped":
            run.start()
            run.barrier()
            if act in SEEN_AT_START:
                assert_equal_or_loud(run, allowed)
        change(run, 3)
        run.barrier()
        change(run, 4)
        run.barrier()
        assert_equal_or_loud(run, allowed)
        run.stop()


LAKE_READS = (
    "headwater.destinations.iceberg.apply:LakeTable.load",
    "headwater.destinations.iceberg.apply:steps_after",
    "headwater.destinations.iceberg.table:LakeTable.stage",
    "headwater.destinations.iceberg.unchanged_values:MissingValues._read_target",
)


@pytest.mark.invariant(6)
@pytest.mark.parametrize(
    "act", [compact_and_expire, pytest.param(roll_back, marks=pytest.mark.slow)], ids=lambda act: act.__name__
)
@pytest.mark.parametrize("read", LAKE_READS)
def test_what_another_program_does_behind_a_read_of_the_lake_ends_equal_or_loud(
    database: Database, spark: SparkSession, tmp_path: Path, read: str, act: Callable[[Lake], None]
) -> None:
    """Whatever was read is pinned to a lake snapshot; what was committed since is merged with, or ends the attempt."""
    lake, moments = Lake(spark, tmp_path), iter((False, True))
    with lake_run(database, spark, tmp_path, [*SHOP, LARGE]) as run:
        run.start()
        run.wait_settled()
        change(run, 1)
        run.barrier()

        def meanwhile() -> None:
            # Not behind the first: that one may be of the other table.
            if next(moments, False):
                act(lake)

        with run_after_call(read, meanwhile):
            for by in (2, 3, 4):
                change(run, by)
                run.execute(f"update orders set id = {2000 + by} where id = {10 + by}")
                run.barrier()
        assert next(moments, None) is None, "the read was not made twice"
        assert_equal_or_loud(run, None if act is compact_and_expire else ORDERS)
        run.stop()


@pytest.mark.invariant(5)
@pytest.mark.parametrize("where", ["second_cluster", "second_database"])
def test_a_second_source_with_the_same_pipeline_id_and_warehouse_replaces_no_rows_of_the_first(
    database: Database, spark: SparkSession, tmp_path: Path, where: str
) -> None:
    with lake_run(database, spark, tmp_path, SHOP) as run:
        run.start()
        run.wait_settled()
        change(run, 1)
        run.barrier()
        run.stop()
    if where == "second_cluster":
        with PostgresServer.start() as server:
            _second(server, spark, tmp_path)
    else:
        database.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots where not active")
        _second(database.server, spark, tmp_path)
    for table in (ORDERS, ITEMS):
        compare_table(database.connection, table, open_lake(tmp_path / "lake")).assert_equal()


def _second(server: PostgresServer, spark: SparkSession, directory: Path) -> None:
    """The same names with other rows, and a table that the first source lacks, which may be mirrored."""
    statements = [statement.replace("i, i,", "i, -i,") for statement in SHOP]
    own = "create table own(id int primary key); insert into own values (1); alter publication shop add table own"
    with fresh_database(server) as database, lake_run(database, spark, directory, [*statements, own]) as run:
        run.start()
        run.wait_settled()
        run.execute("insert into own values (2); update orders set n = 7 where id = 5")
        run.barrier()
        failures = run.failures()
        assert {ORDERS, ITEMS} == failures.keys()
        assert all(state.solution for state in failures.values())
        assert run.differences().keys() == failures.keys()
        run.stop()
