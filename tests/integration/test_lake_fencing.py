"""What a late attempt, another pipeline or another program leaves in a lake table is never taken for this table's rows."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headwater.config import DestinationConfig
from headwater.contracts.results import WriteTableRowsResult
from headwater.destinations.iceberg.schema import TABLE_PROPERTIES, table_properties
from headwater.destinations.iceberg.types import lake_arrow_schema, spark_schema, to_lake
from headwater.errors import ChangeRefused, HeadwaterError
from headwater.events import OLD_FULL, UNCHANGED, TableRows
from headwater.lsn import EndLsn
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicaIdentity
from headwater.spark import frames
from headwater.spark.frames import FrameSpool
from tests.integration.lake_destination import (
    ID_V,
    Lake,
    change_run,
    finish,
    insert,
    rows_table,
    table_schema,
    update,
)
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS


@pytest.mark.invariant(6)
def test_a_late_first_copy_of_a_dead_run_does_not_land_on_an_empty_one(
    spark: SparkSession, lake_settings: DestinationConfig
) -> None:
    dead, alive, schema = Lake(spark, lake_settings), Lake(spark, lake_settings), table_schema(*ID_V)
    lake = lake_arrow_schema(schema)
    frame = spark.createDataFrame(to_lake(rows_table(arrow_schema(schema), [(1, "old")]), lake), spark_schema(lake))

    def rows_of_the_dead_run() -> object:
        alive.copy(schema, [], lsn=300, epoch="e2")
        return frame

    dead.store.store_table_schema(schema.table_schema)
    result = WriteTableRowsResult()
    late = TableRows("e1", EndLsn(100), rows_of_the_dead_run, lambda: iter(()))  # type: ignore[arg-type]
    with pytest.raises(HeadwaterError):
        finish(result, lambda: dead.destination.write_table_rows(schema, late, result))
    assert alive.rows(schema) == []
    alive.write(change_run(schema, 400, insert(7, "x")))
    assert alive.rows(schema) == [(7, "x")]


@pytest.mark.invariant(11)
def test_where_rows_have_no_key_the_two_zeros_are_two_values(lake: Lake) -> None:
    schema = table_schema(("a", 23), ("f", 701), key=(), replica_identity=ReplicaIdentity.FULL)
    lake.copy(schema, [(1, 0.0), (1, -0.0)])
    lake.write(change_run(schema, 200, update(2, -0.0, old=(1, 0.0), kind=OLD_FULL)))
    assert sorted((a, math.copysign(1, f)) for a, f in lake.rows(schema)) == [(1, -1.0), (2, -1.0)]
    lake.write(change_run(schema, 201, update(2, 0.0, old=(2, -0.0), kind=OLD_FULL)))
    assert sorted((a, math.copysign(1, f)) for a, f in lake.rows(schema)) == [(1, -1.0), (2, 1.0)]


@pytest.mark.invariant(12)
def test_a_column_that_another_program_dropped_and_added_again_is_not_taken_for_the_old_one(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a"), (2, "b")])
    identifier = lake.identifier(schema)
    lake.spark.sql(f"alter table {identifier} drop column v")
    lake.spark.sql(f"alter table {identifier} add column v string")
    with pytest.raises(ChangeRefused) as raised:
        lake.write(change_run(schema, 200, update(1, UNCHANGED)))
    assert "another program" in raised.value.detail
    lake.copy(schema, [(1, "a"), (2, "b")], lsn=300, epoch="e2")
    lake.write(change_run(schema, 400, insert(3, "c")))
    assert lake.rows(schema) == [(1, "a"), (2, "b"), (3, "c")]


def test_what_the_writer_relies_on_is_no_choice_of_the_table_properties(caplog: pytest.LogCaptureFixture) -> None:
    chosen = {"write.merge.mode": "copy-on-write", "write.parquet.compression-codec": "gzip"}
    properties = table_properties(chosen)
    assert properties["write.merge.mode"] == TABLE_PROPERTIES["write.merge.mode"]
    assert properties["write.parquet.compression-codec"] == "gzip"
    assert "write.merge.mode" in caplog.text


@pytest.mark.invariant(6)
def test_two_runs_that_share_a_spool_directory_do_not_read_each_others_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "SPOOL_FROM_BYTES", 0)
    one, other = FrameSpool(str(tmp_path / "spool")), FrameSpool(str(tmp_path / "spool"))
    with ExitStack() as stack:
        spooled = []
        for number, spool in enumerate((one, other)):
            rows = pa.table({"n": pa.array([number], pa.int32())})
            spooled.append(stack.enter_context(spool.frame(spark, rows, spark_schema(rows.schema))))
        assert [frame.collect()[0].n for frame in spooled] == [0, 1]


def test_sources_with_the_same_pipeline_id_have_spools_of_their_own(lake: Lake) -> None:
    destination, context = lake.destination, lake.destination._context
    assert context is not None
    others = (replace(context, database_oid=99), replace(context, system_identifier="another"))
    places = {destination._spool_location(each) for each in (context, *others)}
    assert len(places) == 3


@pytest.mark.invariant(16)
def test_a_statement_that_fails_is_not_logged_by_spark_with_the_values_in_it(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match="TABLE_OR_VIEW_NOT_FOUND"):
        spark.sql("select * from nowhere where id in (471147, 471148)").collect()
    logging.getLogger().handlers[0].flush()
    assert "471147" not in capfd.readouterr().err
