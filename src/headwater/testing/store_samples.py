"""Values for tests of stores, each using every part that its kind has."""

from __future__ import annotations

from datetime import UTC, datetime

from headwater.contracts.metadata import DestinationTableMetadata, Watermark
from headwater.contracts.stores import APPLY, PipelineStore, WorkerType
from headwater.errors import HeadwaterError, Retry
from headwater.lsn import CommitLsn, EndLsn
from headwater.schema.table import ColumnSchema, ReplicaIdentity, SnapshotId, TableId, TableName, TableSchema
from headwater.schema.types import BUILT_IN, Kind, PgType
from headwater.states import INIT, READY, TableState, errored

A, B, C = TableId(16384), TableId(16385), TableId(4294967295)
SYNC_A, SYNC_B = WorkerType(A), WorkerType(B)


def table_schema(table_id: TableId, snapshot_id: int, *extra_columns: str) -> TableSchema:
    mood = PgType(16999, "mood", Kind.TEXT)
    columns = (
        ColumnSchema("id", BUILT_IN[20], nullable=False, attnum=1, primary_key=True),
        ColumnSchema('wie "so" ü', BUILT_IN[1700], typmod=655366, attnum=2),
        ColumnSchema("moods", PgType(17000, "mood[]", Kind.ARRAY, mood), attnum=4),
        *(ColumnSchema(name, BUILT_IN[25], attnum=5 + i) for i, name in enumerate(extra_columns)),
    )
    return TableSchema(
        table_id, TableName("public", f"t{table_id}"), columns, SnapshotId(snapshot_id), ReplicaIdentity.INDEX, ("id",)
    )


def table_metadata(destination: str, lsn: int = 0x16B3748, ordinal: int = 3) -> DestinationTableMetadata:
    mark = Watermark(1, "7000000000000000001", "epoch-1", CommitLsn(lsn), ordinal)
    return DestinationTableMetadata(destination, SnapshotId(100), (True, False, True), watermark=mark)


def table_error() -> TableState:
    error = HeadwaterError("it broke", detail='at "x"', hint="mend it", retry=Retry.TIMED)
    return errored(error, attempts=2, next_retry=datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC))


def fill(store: PipelineStore) -> None:
    """Two tables with everything a table can have, and apply progress."""
    store.update_table_states([(A, INIT), (B, INIT)])
    store.update_table_states([(A, READY), (B, READY)])
    for table_id in (A, B):
        for snapshot_id in (100, 200):
            store.store_table_schema(table_schema(table_id, snapshot_id))
        store.upsert_replication_progress(WorkerType(table_id), EndLsn(500))
    store.store_destination_tables_metadata({A: table_metadata(f"t{A}"), B: table_metadata(f"t{B}")})
    store.upsert_replication_progress(APPLY, EndLsn(1000))


def assert_whole(store: PipelineStore, table_id: TableId, worker: WorkerType) -> None:
    assert store.get_table_state(table_id) == READY
    assert store.get_destination_table_metadata(table_id) == table_metadata(f"t{table_id}")
    assert versions(store)[table_id] == [100, 200]
    assert store.get_replication_progress(worker) == EndLsn(500)


def versions(store: PipelineStore) -> dict[TableId, list[int]]:
    versions: dict[TableId, list[int]] = {}
    for schema in store.get_table_schemas():
        versions.setdefault(schema.id, []).append(schema.snapshot_id)
    return {table_id: sorted(found) for table_id, found in versions.items()}
