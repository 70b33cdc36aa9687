"""Values for tests of stores, each using every part that its kind has."""

from __future__ import annotations

from datetime import UTC, datetime

from headwater.contracts.metadata import DestinationTableMetadata, Watermark
from headwater.errors import HeadwaterError, Retry
from headwater.lsn import CommitLsn
from headwater.schema.table import ColumnSchema, ReplicaIdentity, SnapshotId, TableId, TableName, TableSchema
from headwater.schema.types import BUILT_IN, Kind, PgType
from headwater.states import TableState, errored


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
