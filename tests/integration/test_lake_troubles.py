"""A table that fails in the lake does not stop or delay the others (invariant 15)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pyspark.sql import SparkSession

from headwater.contracts.results import PendingResult, WriteEventsResult
from headwater.destinations.iceberg.names import RESERVED
from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.warehouse import location
from headwater.errors import DestinationError, HeadwaterError, LakeTableError, LakeTableTaken, Retry, WatermarkError
from headwater.events import OLD_FULL, UNCHANGED, EventBatch
from headwater.lsn import EndLsn
from headwater.schema.table import ReplicaIdentity, ReplicatedTableSchema
from headwater.testing.lake_rows import open_lake
from tests.conftest import Database
from tests.integration.lake_destination import (
    ID_V,
    ONE_TRANSACTION,
    Lake,
    change_run,
    delete,
    insert,
    table_schema,
    update,
)
from tests.integration.lake_pipeline import running_into_lake
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS


def lose_data_files(warehouse: Path, name: str) -> None:
    for task in open_lake(warehouse).load_table(("public", name)).scan().plan_files():
        Path(urlsplit(task.file.file_path).path).unlink()


@pytest.mark.invariant(15)
def test_a_lost_data_file_is_its_tables_own_error_and_a_lake_that_cannot_be_written_is_no_tables(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = table_schema(*ID_V), table_schema(*ID_V)
    for schema in (good, bad):
        lake.copy(schema, [(1, "a"), (2, "b")])
    lose_data_files(Path(location(lake.settings)), bad.name.name)

    def write(lsn: int) -> PendingResult:
        result = WriteEventsResult()
        pending = PendingResult(result)
        tables = {schema.id: [change_run(schema, lsn, update(1, "new"))] for schema in (good, bad)}
        lake.destination.write_events(EventBatch(tables, ONE_TRANSACTION, EndLsn(1)), result)
        pending.settle(120)
        return pending

    def read_only(self: LakeTable) -> None:
        raise OSError("read-only")

    with monkeypatch.context() as while_away:
        while_away.setattr(LakeTable, "write_probe", read_only)
        for _ in range(3):
            with pytest.raises(DestinationError) as raised:
                write(200).raise_if_failed()
            assert not isinstance(raised.value, LakeTableError)
    pending = write(200)
    pending.raise_if_failed()
    assert list(pending.table_errors) == [bad.id]
    assert isinstance(pending.table_errors[bad.id], LakeTableError)
    assert pending.table_errors[bad.id].retry is Retry.TIMED
    assert lake.rows(good) == [(1, "new"), (2, "b")]
    lake.copy(bad, [(1, "copied again")], epoch="e2")
    assert lake.rows(bad) == [(1, "copied again")]


@pytest.mark.invariant(15)
def test_a_pipeline_copies_a_table_again_whose_data_file_is_lost_and_mirrors_columns_with_reserved_names(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.execute(
        "create table broken(id int primary key, v text); insert into broken select i, 'v' from generate_series(1, 9) i;"
        "create table other(id int primary key, v text); insert into other values (1, 'a');"
        "create table reserved(_pos int primary key, _file text, \"_ROW_ID\" int); insert into reserved values (1, 'f', 7);"
        "create publication shop for table broken, other, reserved"
    )
    with running_into_lake(database, spark, tmp_path) as run:
        run.wait_ready(3)
        lose_data_files(run.warehouse, "broken")
        database.execute("update broken set v = 'new' where id = 1; update other set v = 'b'")
        database.execute("insert into reserved values (2, 'g', 8); update reserved set _pos = 10 where _pos = 1")
        run.wait_caught_up()
        run.wait_ready(3)
        run.assert_equal("broken", "other")
        rows = (
            open_lake(run.warehouse).load_table(("public", "reserved")).scan().to_arrow().sort_by("_pos_").to_pylist()
        )
        assert rows == [
            {"_pos_": 2, "_file_": "g", "_ROW_ID_": 8},
            {"_pos_": 10, "_file_": "f", "_ROW_ID_": 7},
        ]
        run.stop()


def test_columns_with_every_reserved_name_are_written_by_each_way_and_say_what_they_were(lake: Lake) -> None:
    names = [(name, 25) for name in sorted(RESERVED)]
    keyed = table_schema(("_pos", 20), *(name for name in names if name[0] != "_pos"), key=("_pos",))
    whole = table_schema(("id", 20), *names, key=(), replica_identity=ReplicaIdentity.FULL)
    for schema, key in ((keyed, "_pos_"), (whole, "id")):
        width = len(schema.columns) - 1
        lake.copy(schema, [(1, *["a"] * width), (2, *["b"] * width), (3, *["c"] * width)])
        old = [None] * width if schema is keyed else ["b"] * width
        lake.source = {(9,): (9, *["s"] * width)}
        more = [insert(9, *[UNCHANGED] * width)] if schema is keyed else []
        lake.write(
            change_run(
                schema, 200, delete(1, *(old if schema is keyed else ["a"] * width), kind=OLD_FULL),
                update(20, *[UNCHANGED] * width, old=(2, *old), kind=1 if schema is keyed else OLD_FULL),
                insert(4, *["d"] * width), *more,
            )
        )  # fmt: skip
        expected = [(20, *["b"] * width), (3, *["c"] * width), (4, *["d"] * width)]
        assert lake.rows(schema) == expected + ([(9, *["s"] * width)] if more else [])
        assert lake.spark.table(lake.identifier(schema)).columns[0] == key
    described = {r.col_name: r.comment for r in lake.spark.sql(f"DESCRIBE {lake.identifier(keyed)}").collect()}
    assert described["_file_"] == 'column "_file" of the source'


@pytest.mark.invariant(5)
def test_what_the_lake_lacks_of_recorded_tables_is_reported_at_start(lake: Lake) -> None:
    whole, gone, emptied, rolled, taken = (table_schema(*ID_V) for _ in range(5))
    tables: list[ReplicatedTableSchema] = [whole, gone, emptied, rolled, taken]
    for schema in tables:
        lake.copy(schema, [(1, "a")])
    lake.write(change_run(rolled, 200, update(1, "b")))
    lake.spark.sql(f"DROP TABLE {lake.identifier(gone)}")
    lake.spark.sql(f"CREATE OR REPLACE TABLE {lake.identifier(emptied)} (id bigint, v string) USING iceberg")
    first = lake.snapshots(rolled)[0].snapshot_id
    lake.spark.sql(f"CALL lake.system.rollback_to_snapshot(table => '{rolled.name}', snapshot_id => {first})")
    lake.spark.sql(f"ALTER TABLE {lake.identifier(taken)} SET TBLPROPERTIES ('headwater.system-identifier' = 'other')")
    ids = [schema.id for schema in tables]
    assert lake.destination.furthest_position(ids) == EndLsn(100)
    found = lake.destination.missing_tables(ids)
    wanted: dict[int, tuple[type[HeadwaterError], str]] = {
        gone.id: (WatermarkError, "does not exist any more"),
        emptied.id: (WatermarkError, "has no watermark"),
        rolled.id: (WatermarkError, "behind the recorded position"),
        taken.id: (LakeTableTaken, "did not write"),
    }
    assert found.keys() == wanted.keys()
    for table, (kind, text) in wanted.items():
        assert isinstance(found[table], kind)  # type: ignore[index]
        assert text in found[table].message  # type: ignore[index]
