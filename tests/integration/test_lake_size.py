"""What is large, through copy and stream, into the lake: one row of 64 MiB, a table of very many columns."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import sql
from pyspark.sql import SparkSession

from tests.conftest import Database
from tests.driver import driver
from tests.integration.lake import lake_running

# PySpark leaves the sockets it collects over to the garbage collector.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MIB = 1 << 20


@pytest.mark.parametrize("mib", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_one_row_of_64_mib_goes_through_copy_and_stream_into_the_lake(
    database: Database, tmp_path: Path, mib: int
) -> None:
    """With the memory that a pipeline has by default, which is more than the tests' own Spark has."""
    database.execute("create table files(id int primary key, name text, content bytea)")
    # Bytes that compress badly: what is small on the way would show nothing.
    row = """insert into files select {id}, 'f', string_agg(sha512(({id} * 10000000 + i)::text::bytea), ''::bytea)
             from generate_series(1, {size} / 64) i"""
    database.execute(row.format(id=1, size=mib * MIB))
    database.execute("create publication shop for table files")
    with driver(database, tmp_path) as run:
        run.start()
        run.wait_ready(1)
        database.execute(row.format(id=2, size=mib * MIB))
        # The large value does not change, so the server does not send it.
        database.execute("update files set name = 'g' where id = 1")
        run.wait_caught_up()
        assert run.stop() == 0, run.output
        run.assert_equal("files")
        assert database.value("select sum(length(content)) from files") == 2 * mib * MIB


@pytest.mark.parametrize("count", [300, pytest.param(1600, marks=pytest.mark.slow)])
def test_a_table_of_very_many_columns_is_copied_and_followed(
    database: Database, spark: SparkSession, tmp_path: Path, count: int
) -> None:
    """1,600 columns are the most that Postgres allows; 300 are what there is time for every day."""
    columns = [f"c{number}" for number in range(1, count)]
    listed = sql.SQL(", ").join(sql.SQL("{} int").format(sql.Identifier(column)) for column in columns)
    database.execute(sql.SQL("create table wide(id int primary key, {})").format(listed))
    values = sql.SQL(", ").join(sql.SQL("i + {}").format(number) for number in range(len(columns)))
    insert = sql.SQL("insert into wide select i, {} from generate_series(%s::int, %s::int) i").format(values)
    database.execute(insert, [1, 20])
    database.execute("create publication shop for table wide")
    with lake_running(database, spark, tmp_path) as run:
        run.wait_states("ready", 1, 400)
        database.execute(insert, [21, 25])
        database.execute(f"update wide set {columns[-1]} = null, {columns[0]} = -1 where id <= 5")
        database.execute("update wide set id = id + 100 where id = 6; delete from wide where id = 7")
        run.wait_caught_up(400)
        run.assert_equal("wide")
