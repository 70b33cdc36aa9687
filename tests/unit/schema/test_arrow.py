from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.schema.arrow import arrow_type
from headwater.schema.table import (
    ColumnSchema,
    ReplicaIdentity,
    ReplicatedTableSchema,
    TableId,
    TableName,
    TableSchema,
    schema_from_json,
    schema_to_json,
)
from headwater.schema.types import BUILT_IN, Kind, PgType, other


def numeric(precision: int, scale: int) -> ColumnSchema:
    return ColumnSchema("n", BUILT_IN[1700], typmod=(precision << 16 | scale & 0x7FF) + 4)


@pytest.mark.invariant(11)
@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (numeric(12, 2), pa.decimal128(12, 2)),
        (numeric(38, 10), pa.decimal128(38, 10)),
        (numeric(39, 2), pa.string()),
        (numeric(5, -2), pa.decimal128(7, 0)),
        (numeric(3, 5), pa.decimal128(5, 5)),
        (ColumnSchema("n", BUILT_IN[1700]), pa.string()),
        (ColumnSchema("n", PgType(99, "price", Kind.NUMERIC, base_typmod=(8 << 16 | 2) + 4)), pa.decimal128(8, 2)),
        (ColumnSchema("a", BUILT_IN[1007]), pa.list_(pa.field("element", pa.int32()))),
        (ColumnSchema("x", other(3614, "tsvector")), pa.string()),
    ],
)
def test_a_column_becomes_the_arrow_type_that_holds_it_exactly(column: ColumnSchema, expected: pa.DataType) -> None:
    assert arrow_type(column) == expected


def table(identity: ReplicaIdentity, index: tuple[str, ...] = ()) -> TableSchema:
    columns = (
        ColumnSchema("id", BUILT_IN[23], attnum=1, nullable=False, primary_key=True),
        ColumnSchema("code", BUILT_IN[25], attnum=2, nullable=False),
        ColumnSchema("n", numeric(12, 2).type, numeric(12, 2).typmod, attnum=3),
    )
    return TableSchema(TableId(1), TableName("public", "t"), columns, replica_identity=identity, identity_columns=index)


@pytest.mark.invariant(13)
@pytest.mark.parametrize(
    ("schema", "mask", "key"),
    [
        (table(ReplicaIdentity.DEFAULT), (), ("id",)),
        (table(ReplicaIdentity.FULL), (), ("id",)),
        (table(ReplicaIdentity.INDEX, ("code",)), (), ("code",)),
        (table(ReplicaIdentity.NOTHING), (), ()),
        (table(ReplicaIdentity.DEFAULT), (False, True, True), ()),
    ],
)
def test_the_mirrors_key_is_the_replica_identitys(
    schema: TableSchema, mask: tuple[bool, ...], key: tuple[str, ...]
) -> None:
    assert ReplicatedTableSchema(schema, mask).key == key


def test_a_schema_survives_its_json() -> None:
    schema = table(ReplicaIdentity.INDEX, ("code",))
    assert schema_from_json(schema_to_json(schema)) == schema
