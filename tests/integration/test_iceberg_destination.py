"""What the Iceberg destination promises, with real Spark and the embedded catalog."""

from __future__ import annotations

import datetime as dt
import threading
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.contracts.results import (
    DropTableForCopyResult,
    PendingResult,
    WriteEventsResult,
)
from headwater.destinations.iceberg.outcome import CommitOutcome, outcome_of
from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.types import quote
from headwater.destinations.iceberg.warehouse import location
from headwater.errors import ChangeRefused, DestinationError, WatermarkError
from headwater.events import (
    INSERT,
    OLD_FULL,
    UNCHANGED,
    EventBatch,
)
from headwater.lsn import CommitLsn, EndLsn
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import (
    ColumnSchema,
    ReplicaIdentity,
    ReplicatedTableSchema,
    SnapshotId,
    TableId,
    TableName,
)
from headwater.schema.types import BUILT_IN
from tests.integration.lake_destination import (
    ID_V,
    ONE_TRANSACTION,
    Lake,
    change_run,
    delete,
    finish,
    insert,
    table_schema,
    truncate,
    update,
)
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS


@pytest.mark.promise("a promoted standby that lacks the slot, or what the lake has, is an error")
@pytest.mark.invariant(10)
def test_the_furthest_position_is_the_lakes_own_and_not_what_was_recorded(lake: Lake) -> None:
    copied, changed, unknown = table_schema(*ID_V), table_schema(*ID_V), TableId(99_999_999)
    lake.copy(copied, [(1, "a")], lsn=300)
    lake.copy(changed, [(1, "a")], lsn=100)
    recorded = lake.store.get_destination_table_metadata(changed.id)
    assert recorded is not None
    lake.write(change_run(changed, 400, update(1, "b")))
    # As after a failover that took the store back with the source.
    lake.store.store_destination_table_metadata(changed.id, recorded)
    assert lake.destination.furthest_position([]) is None
    assert lake.destination.furthest_position([unknown]) is None
    assert lake.destination.furthest_position([copied.id]) == EndLsn(300)
    assert lake.destination.furthest_position([copied.id, changed.id, unknown]) == EndLsn(401)


@pytest.mark.invariant(14)
def test_inserts_updates_and_deletes_are_mirrored_and_an_insert_of_a_known_key_is_an_upsert(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a"), (2, "b"), (3, "c")])
    lake.write(
        change_run(
            schema,
            200,
            insert(4, "d"),
            update(1, "A"),
            delete(2, None),
            insert(3, "again"),
            insert(5, "x"),
            delete(5, None),
        )
    )
    assert lake.rows(schema) == [(1, "A"), (3, "again"), (4, "d")]
    metadata = lake.store.get_applied_destination_table_metadata(schema.id)
    assert metadata is not None
    assert metadata.watermark is not None
    assert (metadata.watermark.commit_lsn, metadata.watermark.ordinal) == (CommitLsn(200), 5)


@pytest.mark.invariant(5)
def test_the_watermark_travels_in_the_lake_commit(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [])
    lake.write(change_run(schema, 0x16B3748, insert(1, "a"), first=7))
    copied, applied = (row.summary for row in lake.snapshots(schema))
    assert copied["headwater.opens-epoch"] == "true"
    assert (copied["headwater.commit-lsn"], copied["headwater.ordinal"]) == ("0/64", "-1")
    assert (applied["headwater.commit-lsn"], applied["headwater.ordinal"]) == ("0/16B3748", "7")
    assert applied["headwater.opens-epoch"] == "false"
    assert (applied["headwater.pipeline-id"], applied["headwater.system-identifier"]) == ("1", "7001")


@pytest.mark.promise("key updates")
@pytest.mark.invariant(12)
@pytest.mark.invariant(13)
def test_a_changed_key_is_a_delete_and_an_insert_and_keeps_unchanged_values_through_chains(lake: Lake) -> None:
    schema = table_schema(*ID_V, ("n", 23))
    lake.copy(schema, [(1, "toasted one", 0), (2, "toasted two", 0), (3, "three", 0)])
    lake.write(
        change_run(
            schema,
            200,
            update(10, UNCHANGED, 1, old=(1, None, None)),
            update(11, UNCHANGED, 2, old=(10, None, None)),
            update(2, UNCHANGED, 3),
            update(2, UNCHANGED, 4),
            update(4, "new", 5, old=(3, None, None)),
        )
    )
    assert lake.rows(schema) == [(11, "toasted one", 2), (2, "toasted two", 4), (4, "new", 5)]
    assert lake.destination.source_rows_read == 0


@pytest.mark.promise("key updates")
def test_rows_that_swap_their_keys_by_a_third_one_keep_their_values(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "one"), (2, "two")])
    steps = [
        update(9, UNCHANGED, old=(1, None)),
        update(1, UNCHANGED, old=(2, None)),
        update(2, UNCHANGED, old=(9, None)),
    ]
    lake.write(change_run(schema, 200, *steps))
    assert lake.rows(schema) == [(1, "two"), (2, "one")]


@pytest.mark.promise("TOAST unchanged under each")
@pytest.mark.invariant(12)
def test_an_unchanged_value_that_no_target_row_has_is_read_from_the_source_and_never_becomes_null(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    later = ReplicatedTableSchema(replace(schema.table_schema, snapshot_id=SnapshotId(250)))
    lake.copy(schema, [(1, "a")])
    lake.source = {(7,): (7, "from the source"), (10,): (10, "moved")}
    lake.write(change_run(schema, 200, insert(7, UNCHANGED)))
    assert lake.destination.source_rows_read == 1
    with pytest.raises(ChangeRefused, match="cannot be found"):
        lake.write(change_run(schema, 210, insert(8, UNCHANGED), insert(2, "b")))
    assert lake.rows(schema) == [(1, "a"), (7, "from the source")]
    # What comes later in the batch has the last word: the one row is deleted, the other found under its new key.
    gone = [insert(8, UNCHANGED), insert(9, UNCHANGED)]
    lake.write(
        change_run(schema, 210, *gone), change_run(later, 300, delete(8, None), update(10, UNCHANGED, old=(9, None)))
    )
    assert lake.rows(schema) == [(1, "a"), (10, "moved"), (7, "from the source")]


@pytest.mark.promise("TOAST unchanged under each")
@pytest.mark.invariant(12)
def test_with_full_identity_unchanged_values_come_from_the_old_row(lake: Lake) -> None:
    schema = table_schema(*ID_V, replica_identity=ReplicaIdentity.FULL)
    lake.copy(schema, [(1, "a")])
    lake.write(change_run(schema, 200, update(1, UNCHANGED, old=(1, "full"), kind=OLD_FULL)))
    assert lake.rows(schema) == [(1, "full")]


@pytest.mark.invariant(19)
@pytest.mark.promise("one, and rows after it")
def test_a_truncate_and_the_rows_after_it_are_one_lake_commit(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a"), (2, "b")])
    before = len(lake.snapshots(schema))
    lake.write(
        change_run(schema, 200, insert(3, "gone")),
        truncate(schema, 300),
        change_run(schema, 301, insert(1, "new"), insert(2, "n")),
    )
    assert lake.rows(schema) == [(1, "new"), (2, "n")]
    assert len(lake.snapshots(schema)) == before + 1
    lake.write(truncate(schema, 400))
    assert lake.rows(schema) == []
    assert len(lake.snapshots(schema)) == before + 2


@pytest.mark.invariant(5)
def test_replay_of_a_batch_makes_no_commit_and_a_partly_covered_one_writes_the_rest(lake: Lake) -> None:
    schema = table_schema(*ID_V, key=(), replica_identity=ReplicaIdentity.NOTHING)
    lake.copy(schema, [(0, "copied")])
    lake.write(change_run(schema, 200, insert(1, "a"), insert(1, "a")))
    count = len(lake.snapshots(schema))
    lake.write(change_run(schema, 200, insert(1, "a"), insert(1, "a")))
    assert len(lake.snapshots(schema)) == count
    lake.write(change_run(schema, 200, insert(1, "a"), insert(1, "a"), insert(1, "c")))
    assert lake.rows(schema) == [(0, "copied"), (1, "a"), (1, "a"), (1, "c")]
    assert len(lake.snapshots(schema)) == count + 1


@pytest.mark.invariant(5)
def test_a_lake_ahead_of_the_store_continues_and_one_behind_it_is_an_error(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a")])
    recorded = lake.store.get_destination_table_metadata(schema.id)
    assert recorded is not None
    lake.write(change_run(schema, 200, update(1, "b")))
    ahead = lake.store.get_destination_table_metadata(schema.id)
    lake.store.store_destination_table_metadata(schema.id, recorded)
    lake.write(change_run(schema, 200, update(1, "b")), change_run(schema, 210, update(1, "c")))
    assert lake.rows(schema) == [(1, "c")]
    first = lake.snapshots(schema)[0].snapshot_id
    lake.spark.sql(f"CALL lake.system.rollback_to_snapshot(table => '{schema.name}', snapshot_id => {first})")
    assert ahead is not None
    with pytest.raises(WatermarkError, match="behind the recorded position") as raised:
        lake.write(change_run(schema, 300, update(1, "d")))
    assert "headwater resync" in raised.value.hint
    assert lake.rows(schema) == [(1, "a")]


@pytest.mark.invariant(5)
def test_another_epoch_than_the_recorded_one_is_an_error(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a")], epoch="e1")
    recorded = lake.store.get_destination_table_metadata(schema.id)
    assert recorded is not None
    lake.copy(schema, [(1, "b")], epoch="e2")
    lake.store.store_destination_table_metadata(schema.id, recorded)
    with pytest.raises(WatermarkError, match="another copy"):
        lake.write(change_run(schema, 300, update(1, "d")))


def test_one_tables_error_names_the_table_and_the_others_are_written(lake: Lake) -> None:
    good, bad = table_schema(*ID_V), table_schema(*ID_V)
    lake.copy(good, [(1, "a")])
    lake.copy(bad, [(1, "a")])
    lake.spark.sql(f"DROP TABLE {lake.identifier(bad)}")
    tables = {good.id: [change_run(good, 200, update(1, "b"))], bad.id: [change_run(bad, 200, update(1, "b"))]}
    result = WriteEventsResult()
    pending = PendingResult(result)
    lake.destination.write_events(EventBatch(tables, ONE_TRANSACTION, EndLsn(1)), result)
    pending.wait()
    assert list(pending.table_errors) == [bad.id]
    assert isinstance(pending.table_errors[bad.id], WatermarkError)
    assert lake.rows(good) == [(1, "b")]


def test_commits_of_others_without_a_watermark_do_not_hide_ours(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a"), (2, "b")])
    lake.write(change_run(schema, 200, update(1, "b")))
    lake.spark.sql(f"DELETE FROM {lake.identifier(schema)} WHERE id = 2")
    lake.write(change_run(schema, 200, update(1, "b")), change_run(schema, 201, insert(3, "c")))
    assert lake.rows(schema) == [(1, "b"), (3, "c")]


@pytest.mark.invariant(19)
def test_a_new_copy_replaces_the_old_rows_in_one_commit_and_dropping_keeps_them(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    dropped = DropTableForCopyResult()
    finish(dropped, lambda: lake.destination.drop_table_for_copy(schema, dropped))
    lake.copy(schema, [(1, "a")], lsn=900)
    for _ in range(2):
        result = DropTableForCopyResult()
        finish(result, partial(lake.destination.drop_table_for_copy, schema, result))
    assert lake.rows(schema) == [(1, "a")]
    before = len(lake.snapshots(schema))
    lake.copy(schema, [(2, "b")], lsn=500, epoch="e2")
    assert lake.rows(schema) == [(2, "b")]
    assert len(lake.snapshots(schema)) == before + 1
    lake.write(change_run(schema, 600, insert(3, "c")))
    assert lake.rows(schema) == [(2, "b"), (3, "c")]


def test_a_copy_may_change_columns_and_types(lake: Lake) -> None:
    schema = table_schema(*ID_V, ("gone", 23), ("x", 23))
    lake.copy(schema, [(1, "a", 5, 1)])
    columns = (*schema.table_schema.columns[:2], ColumnSchema("x", BUILT_IN[25]), ColumnSchema("more", BUILT_IN[20]))
    changed = ReplicatedTableSchema(replace(schema.table_schema, columns=columns))
    lake.copy(changed, [(1, "a", "text", 7)], epoch="e2")
    assert [tuple(r) for r in lake.spark.sql(f"SELECT id, v, x, more FROM {lake.identifier(schema)}").collect()] == [
        (1, "a", "text", 7)
    ]
    assert set(lake.spark.table(lake.identifier(schema)).columns) == {"id", "v", "x", "more"}


@pytest.mark.promise("add, drop, rename and widen columns in the lake")
def test_columns_are_added_dropped_renamed_and_widened_between_runs(lake: Lake) -> None:
    schema = table_schema(*ID_V, ("n", 23), ("gone", 25))
    lake.copy(schema, [(1, "a", 1, "x")])
    first, v, n, _ = schema.table_schema.columns
    columns = (
        first,
        replace(v, name="renamed"),
        replace(n, type=BUILT_IN[20]),
        ColumnSchema("more", BUILT_IN[25], attnum=5),
    )
    later = ReplicatedTableSchema(replace(schema.table_schema, columns=columns, snapshot_id=SnapshotId(250)))
    lake.write(change_run(schema, 200, insert(2, "b", 2, "y")), change_run(later, 300, insert(3, "c", 1 << 40, "m")))
    assert sorted(lake.spark.table(lake.identifier(schema)).columns) == ["id", "more", "n", "renamed"]
    rows = lake.spark.sql(f"SELECT id, renamed, n, more FROM {lake.identifier(schema)} ORDER BY id").collect()
    assert [tuple(r) for r in rows] == [(1, "a", 1, None), (2, "b", 2, None), (3, "c", 1 << 40, "m")]
    metadata = lake.store.get_destination_table_metadata(schema.id)
    assert metadata is not None
    assert metadata.snapshot_id == 250


def test_a_populated_table_without_an_owner_is_refused(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.public")
    lake.spark.sql(f"CREATE TABLE {lake.identifier(schema)} (id bigint, v string) USING iceberg")
    lake.spark.sql(f"INSERT INTO {lake.identifier(schema)} VALUES (1, 'precious')")
    with pytest.raises(DestinationError, match="did not write") as raised:
        lake.copy(schema, [(2, "b")])
    assert raised.value.hint
    assert lake.rows(schema) == [(1, "precious")]


@pytest.mark.invariant(6)
def test_a_late_merge_of_another_session_fails_validation(lake: Lake, tmp_path: Path) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a"), (2, "b")])
    started, go = tmp_path / "started", tmp_path / "go"
    other = lake.spark.newSession()

    def when_told(key: int) -> tuple[int]:
        started.touch()
        while not go.exists():
            threading.Event().wait(0.02)
        return (key,)

    held = other.createDataFrame(other.sparkContext.parallelize([1], 1).map(when_told), "id bigint")
    held.createOrReplaceTempView("late")
    errors: list[Exception] = []

    def late() -> None:
        try:
            other.sql(
                f"MERGE INTO {lake.identifier(schema)} t USING late s ON t.id = s.id AND t.id IN (1) "
                "WHEN MATCHED THEN UPDATE SET v = 'late' WHEN NOT MATCHED THEN INSERT (id, v) VALUES (s.id, 'late')"
            )
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    while not started.exists() and thread.is_alive():
        thread.join(0.02)
    lake.write(change_run(schema, 200, update(1, "in time")))
    go.touch()
    thread.join()
    assert [outcome_of(error) for error in errors] == [CommitOutcome.FAILED], errors
    assert lake.rows(schema) == [(1, "in time"), (2, "b")]


@pytest.mark.invariant(6)
@pytest.mark.parametrize("identity", list(ReplicaIdentity))
def test_a_commit_between_the_look_and_the_write_is_seen_and_the_batch_is_written_once_on_top_of_it(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, identity: ReplicaIdentity
) -> None:
    keyed = identity in (ReplicaIdentity.DEFAULT, ReplicaIdentity.INDEX)
    more: dict[str, Any] = {"identity_columns": ("id",)} if identity is ReplicaIdentity.INDEX else {}
    schema = table_schema(*ID_V, key=("id",) if keyed else (), replica_identity=identity, **more)
    lake.copy(schema, [(5, "equal"), (6, "equal")])
    interfered: list[str] = []
    stage = LakeTable.stage

    def interfere(self: LakeTable, start: int) -> str:
        if not interfered:
            interfered.append(lake.identifier(schema))
            lake.spark.sql(f"INSERT INTO {lake.identifier(schema)} VALUES (9, 'foreign')")
        return stage(self, start)

    monkeypatch.setattr(LakeTable, "stage", interfere)
    changes = [insert(1, "a")]
    changes += [update(5, UNCHANGED), update(9, "ours")] if keyed else []
    changes += [delete(5, "equal", kind=OLD_FULL)] if identity is ReplicaIdentity.FULL else []
    lake.write(change_run(schema, 200, *changes))
    assert interfered
    five = [] if identity is ReplicaIdentity.FULL else [(5, "equal")]
    assert lake.rows(schema) == [(1, "a"), *five, (6, "equal"), (9, "ours" if keyed else "foreign")]


@pytest.mark.invariant(6)
def test_a_late_commit_of_a_dead_attempt_to_the_staging_branch_is_not_published(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a"), (2, "b")])
    publish = LakeTable.publish
    late: list[int] = []

    def after_a_late_one(self: LakeTable, start: int, attempt: str, **more: Any) -> Any:
        if not late:
            late.append(start)
            lake.spark.sql(f"UPDATE {lake.identifier(schema)}.branch_headwater_staging SET v = 'late' WHERE id = 2")
        return publish(self, start, attempt, **more)

    monkeypatch.setattr(LakeTable, "publish", after_a_late_one)
    lake.write(change_run(schema, 200, update(1, "in time")))
    assert late
    assert lake.rows(schema) == [(1, "in time"), (2, "b")]


@pytest.mark.promise("tables without a key")
def test_of_two_equal_rows_without_a_key_one_delete_removes_one(lake: Lake) -> None:
    schema = table_schema(("a", 23), ("b", 25), ("c", 1007), key=(), replica_identity=ReplicaIdentity.FULL)
    lake.copy(
        schema, [(1, None, [1, None]), (1, None, [1, None]), (1, None, [1, None]), (2, "x", None), (None, None, None)]
    )
    before = len(lake.snapshots(schema))
    lake.write(
        change_run(
            schema,
            200,
            delete(1, None, [1, None], kind=OLD_FULL),
            update(3, UNCHANGED, None, old=(2, "x", None), kind=OLD_FULL),
            delete(None, None, None, kind=OLD_FULL),
            insert(5, "five", [5]),
            insert(5, "five", [5]),
        )
    )
    assert lake.rows(schema) == [
        (1, None, [1, None]), (1, None, [1, None]), (3, "x", None), (5, "five", [5]), (5, "five", [5]),
    ]  # fmt: skip
    assert len(lake.snapshots(schema)) == before + 1


@pytest.mark.promise("names with quotes, spaces, capitals, unicode and 63 bytes")
def test_names_with_quotes_spaces_dots_capitals_and_unicode_work(lake: Lake) -> None:
    names = [
        TableName("Sp ace\"`'", "Tab`le 'x'"),
        TableName("a.b", "c.d"),
        TableName("Größe", "日本/../x:%20#?"),
        TableName("public", "Case"),
        TableName("public", "case"),
    ]
    schemas = [table_schema(("id", 20), ("we\"i`r.d 'C", 25), ("A", 23), ("a", 23), name=name) for name in names]
    for i, schema in enumerate(schemas):
        lake.copy(schema, [(1, "x", i, 2), (2, "y", i, 3)])
    lake.write(
        *(
            change_run(schema, 200, update(1, UNCHANGED, i, 5), delete(2, *[None] * 3))
            for i, schema in enumerate(schemas)
        )
    )
    for i, schema in enumerate(schemas):
        assert lake.rows(schema) == [(1, "x", i, 5)]
        assert lake.spark.table(lake.identifier(schema)).columns == ["id", "we\"i`r.d 'C", "A", "a"]


@pytest.mark.invariant(11)
def test_values_of_all_types_make_the_round_trip_and_pyiceberg_reads_them(lake: Lake) -> None:
    catalog_module = pytest.importorskip("pyiceberg.catalog.sql")
    schema = table_schema(
        ("id", 21), ("n", 1700), ("big", 1700), ("ts", 1114), ("tz", 1184), ("d", 1082), ("b", 17), ("f", 701), ("g", 700),
        ("t", 16), ("arr", 1005), ("texts", 1009), ("u", 2950),
        n=((10 << 16) | 2) + 4,
    )  # fmt: skip
    utc = dt.UTC
    row = (
        7, Decimal("12345678.90"), "0.10", dt.datetime(2024, 3, 31, 2, 30), dt.datetime(2024, 3, 31, 2, 30, tzinfo=utc),
        dt.date(1, 1, 1), b"\x00\xff", float("inf"), 1.5, True, [1, None, 3], ["a", None], "0b7c7bb4-0000-4000-8000-000000000000",
    )  # fmt: skip
    nothing = (8, *[None] * 12)
    lake.copy(schema, [row])
    lake.write(change_run(schema, 200, insert(9, *row[1:]), insert(*nothing), update(7, *row[1:])))
    catalog = catalog_module.SqlCatalog(
        "lake", uri=f"sqlite:///{location(lake.settings)}/catalog.db", warehouse=location(lake.settings)
    )
    table = catalog.load_table((schema.name.namespace, schema.name.name)).scan().to_arrow()
    read = {r["id"]: tuple(r.values()) for r in table.to_pylist()}
    assert read == {7: row, 9: (9, *row[1:]), 8: nothing}
    catalog.engine.dispose()


def test_two_tables_of_a_batch_are_written_with_a_watermark_each(lake: Lake) -> None:
    one, two = table_schema(*ID_V), table_schema(*ID_V)
    lake.copy(one, [(1, "a")])
    lake.copy(two, [(1, "a")])
    lake.write(change_run(one, 200, update(1, "one")), change_run(two, 300, insert(2, "two"), first=4))
    assert (lake.rows(one), lake.rows(two)) == ([(1, "one")], [(1, "a"), (2, "two")])
    assert lake.snapshots(one)[-1].summary["headwater.commit-lsn"] == "0/C8"
    assert lake.snapshots(two)[-1].summary["headwater.commit-lsn"] == "0/12C"


def test_a_large_batch_goes_through_the_spool_and_leaves_nothing_there(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    size = 60_000
    lake.copy(schema, [(i, "old") for i in range(0, 1000)])
    changes = change_run(schema, 200, insert(0, "x"))
    types = arrow_schema(schema)
    many = replace(
        changes,
        op=np.full(size, INSERT, np.uint8),
        commit_lsn=np.full(size, 200, np.uint64),
        ordinal=np.arange(size),
        transaction=np.zeros(size, np.int64),
        position=np.arange(size),
        new=pa.table({"id": np.arange(size), "v": [f"value {i}" for i in range(size)]}).cast(types),
        old_kind=np.zeros(size, np.uint8),
    )
    lake.write(many)
    found = lake.spark.sql(
        f"SELECT count(*), count(DISTINCT id), count_if(v = 'old') FROM {lake.identifier(schema)}"
    ).collect()
    assert tuple(found[0]) == (size, size, 0)
    assert not list((Path(location(lake.settings)) / ".headwater").rglob("*.parquet"))


def test_a_table_without_a_recorded_copy_is_refused(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    with pytest.raises(WatermarkError, match=r"no copy of table .* is recorded"):
        lake.write(change_run(schema, 200, insert(1, "a")))
    lake.copy(schema, [(1, "a")])
    lake.spark.sql(f"DROP TABLE {lake.identifier(schema)}")
    with pytest.raises(WatermarkError, match="does not exist any more"):
        lake.write(change_run(schema, 200, insert(1, "a")))
    assert quote("a`b") == "`a``b`"
