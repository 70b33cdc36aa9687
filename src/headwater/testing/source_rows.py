"""A source table as Arrow, read without any of our decoders: the oracle's side of a comparison.

Values come as the server's own text in CSV, through psycopg, and Arrow's parsers turn them into the types that
`headwater.schema.arrow` declares. Only the declaration is shared with the product, nothing that reads bytes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator
from typing import IO, Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from pyarrow import csv

from headwater.schema.arrow import arrow_schema, arrow_type
from headwater.schema.table import ColumnSchema, ReplicatedTableSchema, TableId, TableName, TableSchema
from headwater.schema.types import BUILT_IN, Kind, PgType, other

Connection = psycopg.Connection[Any]

# A row must fit into one block of the CSV reader.
BLOCK_BYTES = 16 * 1024 * 1024
# A list of its own, as all of the comparison; a test says that what both lists name has the same value.
PINNED = {
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "3",
    "row_security": "off",
}
_COLUMNS = """
with recursive base as (
    select a.attnum, a.attname, a.attnotnull, a.atttypid as type, a.atttypmod as typmod, 0 as depth
    from pg_attribute a where a.attrelid = %(table)s and a.attnum > 0 and not a.attisdropped
    union all
    select b.attnum, b.attname, b.attnotnull, t.typbasetype, greatest(b.typmod, t.typtypmod), b.depth + 1
    from base b join pg_type t on t.oid = b.type where t.typtype = 'd'
)
select distinct on (b.attnum) b.attnum, b.attname, b.attnotnull, b.typmod, t.oid, t.typname, t.typtype,
       e.oid, e.typname, e.typtype,
       exists (select from pg_index i where i.indrelid = %(table)s and i.indisprimary and b.attnum = any(i.indkey))
from base b join pg_type t on t.oid = b.type left join pg_type e on e.oid = t.typelem and t.typcategory = 'A'
order by b.attnum, b.depth desc
"""


def describe(
    connection: Connection, name: TableName, replicated: Collection[str] | None = None
) -> ReplicatedTableSchema:
    """The table as its catalog describes it now, with all columns replicated or the ones named."""
    found = connection.execute("select to_regclass(%s)::oid", [name.quoted]).fetchone()
    if found is None or found[0] is None:
        raise LookupError(f"the source has no table {name}")
    columns = tuple(_column(row) for row in connection.execute(_COLUMNS, {"table": found[0]}))
    mask = tuple(replicated is None or column.name in replicated for column in columns)
    return ReplicatedTableSchema(TableSchema(TableId(found[0]), name, columns), mask)


def _column(row: tuple[Any, ...]) -> ColumnSchema:
    attnum, name, not_null, typmod, oid, type_name, type_type, element_oid, element_name, element_type, key = row
    if element_oid:
        element = _type(element_oid, element_name, element_type)
        type = PgType(oid, f"{element_name}[]", Kind.ARRAY, element)
    else:
        type = _type(oid, type_name, type_type)
    return ColumnSchema(name, type, typmod, not not_null, attnum, key)


def _type(oid: int, name: str, type_type: str) -> PgType:
    if type_type == "e" or name == "citext":
        return PgType(oid, name, Kind.TEXT)
    return BUILT_IN.get(oid) or other(oid, name)


def read_source(
    connection: Connection, schema: ReplicatedTableSchema, row_filter: str | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of the table now, in no order, without those of tables that inherit from it: a publication sends these as
    tables of their own. The connection's text settings are pinned by this."""
    for name, value in PINNED.items():
        connection.execute("select set_config(%s, %s, false)", [name, value])
    select = sql.SQL("select {} from {} {} where {}").format(
        sql.SQL(", ").join(_expression(column) for column in schema.columns),
        sql.SQL("" if _is_partitioned(connection, schema) else "only"),
        sql.Identifier(schema.name.namespace, schema.name.name),
        sql.SQL(row_filter or "true"),  # as the catalog has it
    )
    statement = sql.SQL("copy ({}) to stdout (format csv, force_quote *)").format(select)
    longest = 0
    with tempfile.TemporaryFile() as file:
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            for row in copy:
                file.write(row)
                longest = max(longest, len(row))
        if file.tell():
            file.seek(0)
            yield from _parse(file, schema, max(BLOCK_BYTES, 2 * longest))


def _is_partitioned(connection: Connection, schema: ReplicatedTableSchema) -> bool:
    found = connection.execute("select relkind = 'p' from pg_class where oid = %s", [schema.id]).fetchone()
    return found is not None and bool(found[0])


def _expression(column: ColumnSchema) -> sql.Composable:
    name = sql.Identifier(column.name)
    if column.type.element is None:
        return name
    # As JSON strings, so that no parser of array literals is needed. The cast to text[] would strip a char(n)'s blanks.
    if column.type.element.name == "bpchar":
        return sql.SQL("to_json({})").format(name)
    return sql.SQL("to_json({}::text[])").format(name)


def _parse(file: IO[bytes], schema: ReplicatedTableSchema, block_bytes: int) -> Iterator[pa.RecordBatch]:
    names = [column.name for column in schema.columns]
    reader = csv.open_csv(
        file,
        read_options=csv.ReadOptions(column_names=names, block_size=block_bytes),
        parse_options=csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        # Quoted is the empty string, unquoted is NULL.
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    declared = arrow_schema(schema)
    for batch in reader:
        columns = [_converted(column, text) for column, text in zip(schema.columns, batch.columns, strict=True)]
        yield pa.record_batch(columns, schema=declared)


def _converted(column: ColumnSchema, text: pa.Array) -> pa.Array:
    wanted = arrow_type(column)
    if column.type.element is None:
        return _scalars(column.type.kind, text, wanted)
    lists = [None if value is None else json.loads(value) for value in text.to_pylist()]
    strings = pa.array(lists, pa.list_(pa.string()))
    elements = _scalars(column.type.element.kind, strings.flatten(), wanted.value_type)
    mask = pa.array([value is None for value in lists])
    # Offsets of a fresh array start at 0, and its NULL lists are empty.
    return pa.ListArray.from_arrays(strings.offsets, elements, type=wanted, mask=mask)


def _scalars(kind: Kind, text: pa.Array, wanted: pa.DataType) -> pa.Array:
    if pa.types.is_string(wanted):
        return text
    if kind is Kind.BOOL:
        return (
            pc.is_in(text, pa.array(["t", "true"]))
            if not text.null_count
            else pc.if_else(text.is_valid(), pc.is_in(text, pa.array(["t", "true"])), pa.scalar(None, pa.bool_()))
        )
    if kind is Kind.BYTEA:
        return pa.array([None if value is None else bytes.fromhex(value[2:]) for value in text.to_pylist()], wanted)
    if kind in (Kind.FLOAT4, Kind.FLOAT8):
        return pa.array([None if value is None else float(value) for value in text.to_pylist()], pa.float64()).cast(
            wanted, safe=False
        )
    return text.cast(wanted)
