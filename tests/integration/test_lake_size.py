"""What is large, through copy and stream, into the lake: one row of 64 MiB, very many columns, very many changes at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import sql
from pyspark.sql import SparkSession

from headwater.destinations.iceberg import parts
from tests.conftest import Database
from tests.integration.lake_pipeline import running_into_lake
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS
from tests.pipeline_process import pipeline_process

pytestmark = [*PYSPARK_SOCKETS, pytest.mark.timeout(600)]

MIB = 1 << 20


@pytest.mark.promise("one row of 64 MiB")
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
    with pipeline_process(database, tmp_path) as run:
        run.start()
        run.wait_ready(1)
        database.execute(row.format(id=2, size=mib * MIB))
        # The large value does not change, so the server does not send it.
        database.execute("update files set name = 'g' where id = 1")
        run.wait_caught_up()
        assert run.stop() == 0, run.output
        run.assert_equal("files")
        assert database.value("select sum(length(content)) from files") == 2 * mib * MIB


@pytest.mark.promise("1,600 columns")
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
    with running_into_lake(database, spark, tmp_path) as run:
        run.wait_states("ready", 1, 400)
        database.execute(insert, [21, 25])
        database.execute(f"update wide set {columns[-1]} = null, {columns[0]} = -1 where id <= 5")
        database.execute("update wide set id = id + 100 where id = 6; delete from wide where id = 7")
        run.wait_caught_up(400)
        run.assert_equal("wide")


@pytest.mark.promise("a transaction of several million rows")
def test_a_transaction_that_is_netted_in_parts_ends_equal_with_moved_keys_and_without_a_key(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_CHANGES", 500)
    # Of the large value the server sends nothing while it does not change.
    columns = "id int {}, n int, note text, large text"
    database.execute(f"create table keyed({columns.format('primary key')}); create table keyless({columns.format('')})")
    database.execute("alter table keyless replica identity full; alter table keyless alter large set storage external")
    rows = "select i, i % 7, 'note ' || i % 90, case when i % 10 = 0 then repeat(md5(i::text), 100) end"
    for name in ("keyed", "keyless"):
        database.execute(f"insert into {name} {rows} from generate_series(1, 2000) i")
    database.execute("create publication shop for table keyed, keyless")
    with running_into_lake(database, spark, tmp_path) as run:
        run.wait_ready(2)
        with database.connection.transaction():
            database.execute("update keyed set id = -id, large = null where id % 3 <> 0")
            database.execute("update keyed set n = n + 1")
            database.execute("update keyed set id = id + 10000 where id between -500 and 500 and large is null")
            database.execute("delete from keyed where id % 11 = 0")
            database.execute(f"insert into keyed {rows} from generate_series(20001, 20300) i")
            database.execute("update keyless set note = 'note ' || id % 5")
            database.execute("insert into keyless select id, n, note, large from keyless where id % 4 = 0")
            database.execute("delete from keyless where ctid in (select ctid from keyless where id % 8 = 0 limit 300)")
        run.wait_caught_up()
        run.assert_equal("keyed", "keyless")
