"""What each Postgres column becomes in Arrow. One function, so that copy, stream and lake agree by construction."""

from __future__ import annotations

import pyarrow as pa

from headwater.schema.table import ColumnSchema, ReplicatedTableSchema
from headwater.schema.types import Kind, PgType

MAX_DECIMAL_PRECISION = 38

_SIMPLE: dict[Kind, pa.DataType] = {
    Kind.BOOL: pa.bool_(),
    Kind.INT2: pa.int16(),
    Kind.INT4: pa.int32(),
    Kind.INT8: pa.int64(),
    Kind.OID: pa.int64(),
    Kind.FLOAT4: pa.float32(),
    Kind.FLOAT8: pa.float64(),
    Kind.TEXT: pa.string(),
    Kind.JSONB: pa.string(),
    Kind.OTHER: pa.string(),
    Kind.UUID: pa.string(),
    Kind.BYTEA: pa.binary(),
    Kind.DATE: pa.date32(),
    Kind.TIMESTAMP: pa.timestamp("us"),
    Kind.TIMESTAMPTZ: pa.timestamp("us", tz="UTC"),
}


def arrow_type(column: ColumnSchema) -> pa.DataType:
    return _arrow_type(column, column.type)


def _arrow_type(column: ColumnSchema, type: PgType) -> pa.DataType:
    if type.kind is Kind.ARRAY:
        assert type.element is not None
        return pa.list_(pa.field("element", _arrow_type(column, type.element)))
    if type.kind is Kind.NUMERIC:
        return _numeric(column)
    return _SIMPLE[type.kind]


def _numeric(column: ColumnSchema) -> pa.DataType:
    """decimal where every value of the declared type fits exactly, else text: never a float."""
    declared = column.numeric_precision
    if declared is None:
        return pa.string()
    precision, scale = declared
    if scale < 0:
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    return pa.decimal128(precision, scale) if precision <= MAX_DECIMAL_PRECISION else pa.string()


def arrow_schema(schema: ReplicatedTableSchema) -> pa.Schema:
    return pa.schema([pa.field(column.name, arrow_type(column)) for column in schema.columns])
