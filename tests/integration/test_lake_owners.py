"""Whose a lake table is: another cluster, another database, another source table of the same name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headwater.destinations.iceberg.watermark import parse_summary
from headwater.errors import DestinationError, LakeTableTaken, Retry, WatermarkError
from headwater.schema.table import ReplicatedTableSchema, TableId, TableName
from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from tests.commands import headwater, write_settings
from tests.conftest import Database, fresh_database
from tests.integration.lake_destination import ID_V, Lake, change_run, table_schema, update
from tests.integration.lake_pipeline import RunningIntoLake, running_into_lake
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS


def named(schema: ReplicatedTableSchema, name: TableName) -> ReplicatedTableSchema:
    return ReplicatedTableSchema(replace(schema.table_schema, name=name))


@pytest.mark.parametrize(("system", "database"), [("7002", 5), ("7001", 6)], ids=["cluster", "database"])
def test_a_second_cluster_or_database_with_the_same_pipeline_id_replaces_no_rows_without_take_over(
    lake: Lake, system: str, database: int
) -> None:
    schema, first_store = table_schema(*ID_V), lake.store
    lake.copy(schema, [(1, "first")])
    lake.destination.shutdown()
    lake.store = MemoryStore()
    lake.start(system, database)
    with pytest.raises(LakeTableTaken, match="did not write") as raised:
        lake.copy(schema, [(1, "second")], epoch="e2")
    assert "headwater resync --take-over" in raised.value.hint
    assert raised.value.retry is Retry.MANUAL
    assert lake.rows(schema) == [(1, "first")]
    lake.copy(schema, [(1, "second")], epoch="e2", take_over=True)
    lake.write(change_run(schema, 200, update(1, "changed")))
    assert lake.rows(schema) == [(1, "changed")]
    lake.destination.shutdown()
    lake.store = first_store
    lake.start()
    with pytest.raises(DestinationError, match="did not write"):
        lake.write(change_run(schema, 300, update(1, "late")))
    assert lake.rows(schema) == [(1, "changed")]


def test_tables_that_swap_their_names_are_copied_to_the_lake_table_of_their_new_name_and_never_write_to_the_others(
    lake: Lake,
) -> None:
    one, two = table_schema(*ID_V), table_schema(*ID_V)
    lake.copy(one, [(1, "one")])
    lake.copy(two, [(1, "two")])
    new_one, new_two = named(one, two.name), named(two, one.name)
    # While the other table still writes there, a copy does not begin.
    with pytest.raises(LakeTableTaken, match="still receives") as raised:
        lake.copy(new_one, [(1, "one")], epoch="e2")
    assert raised.value.retry is Retry.TIMED
    lake.store.prepare_table_state_for_copy(one.id)
    lake.copy(new_two, [(1, "two")], epoch="e2")
    lake.copy(new_one, [(1, "one")], epoch="e3")
    lake.write(change_run(new_one, 200, update(1, "ONE")), change_run(new_two, 200, update(1, "TWO")))
    assert lake.rows(new_one) == [(1, "ONE")]
    assert lake.rows(new_two) == [(1, "TWO")]


def test_changes_of_a_table_whose_lake_table_was_taken_by_another_one_are_an_error_and_no_write(lake: Lake) -> None:
    old = table_schema(*ID_V)
    lake.copy(old, [(1, "old")])
    again = ReplicatedTableSchema(replace(old.table_schema, id=TableId(old.id + 1_000_000)))
    recorded = lake.store.get_destination_table_metadata(old.id)
    assert recorded is not None
    lake.store.delete_table_state(old.id)
    lake.copy(again, [(1, "new")], epoch="e2")
    lake.store.store_destination_table_metadata(old.id, recorded)
    with pytest.raises(LakeTableTaken, match="another source table"):
        lake.write(change_run(old, 200, update(1, "late")))
    assert lake.rows(again) == [(1, "new")]


@pytest.mark.invariant(5)
def test_a_watermark_says_of_which_table_timeline_and_run_it_is_and_one_of_a_newer_timeline_is_an_error(
    lake: Lake,
) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a")])
    lake.timeline = 3
    lake.write(change_run(schema, 200, update(1, "b")))
    marks = [parse_summary(row.summary) for row in lake.snapshots(schema)]
    assert [(m.database_oid, m.table_id, m.timeline, m.run) for m in marks if m] == [
        (5, schema.id, 1, "a run"),
        (5, schema.id, 3, "a run"),
    ]
    lake.timeline = 2
    with pytest.raises(WatermarkError, match="newer timeline"):
        lake.write(change_run(schema, 300, update(1, "c")))
    recorded = lake.store.get_destination_table_metadata(schema.id)
    assert recorded is not None
    assert recorded.watermark is not None
    lake.timeline = 3
    other = replace(recorded.watermark, table_id=schema.id + 1)
    lake.store.store_destination_table_metadata(schema.id, replace(recorded, watermark=other))
    with pytest.raises(WatermarkError, match="another copy"):
        lake.write(change_run(schema, 300, update(1, "c")))
    assert lake.rows(schema) == [(1, "b")]


def test_a_second_database_is_refused_by_the_pipeline_and_resync_with_take_over_lets_it_in(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    shop = "create table t(id int primary key, v text); create publication shop for table t;"
    database.execute(shop + "insert into t values (1, 'first')")
    with running_into_lake(database, spark, tmp_path) as run:
        run.wait_ready(1)
        run.stop()
    # Names of slots are the cluster's.
    database.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots where not active")
    with fresh_database(database.server) as second:
        second.execute(shop + "insert into t values (1, 'second')")
        file = write_settings(second, tmp_path)
        with running_into_lake(second, spark, tmp_path, PostgresStore(second.settings, 1)) as run:
            run.wait_states("errored", 1)
            RunningIntoLake(database, run.pipeline, run.warehouse, run.session).assert_equal("t")
            headwater("resync", file, "--take-over", "public.t")
            run.wait_ready(1)
            second.execute("update t set v = 'changed'")
            run.wait_caught_up()
            run.assert_equal("t")
            run.stop()
