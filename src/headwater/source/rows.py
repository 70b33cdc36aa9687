"""Present rows of the source by key, for the rare change whose value no one else has (invariant 12).

Small counts only: one COPY through the decoder that copy and stream use, so that a value read again is the
value they gave.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from psycopg import sql

from headwater.errors import ProtocolError, Retry, SchemaError, ValueOutOfRange
from headwater.events import SourceRead, SourceSnapshot
from headwater.schema.table import ColumnSchema, ReplicatedTableSchema
from headwater.schema.types import BUILT_IN
from headwater.source.catalog_look import insert_position
from headwater.source.session import Connection, fetch_all, fetch_one, translating
from headwater.wire.copy_binary import CopyDecoder

# The type modifier is left out: without one, -1 gives bpchar where NULL would give character, which is character(1).
_TYPES = """
SELECT attname::text, atttypid::bigint, format_type(atttypid, -1) FROM pg_attribute
WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
"""

# As the stream shows it, by the type's output function: a cast to text is another function for some types (it adds /32 to
# an inet). IS NOT NULL would be false for a composite value with a NULL in it.
_OUTPUT = "CASE WHEN num_nulls(s.{0}) = 0 THEN concat(s.{0}) END"


# No column of a table can have this name.
_WRITTEN_BY = ColumnSchema("xmin", BUILT_IN[20])


def read_rows(connection: Connection, schema: ReplicatedTableSchema, keys: pa.Table) -> SourceRead:
    """The rows that have one of the keys now, all replicated columns; keys that are gone are missing in the answer."""
    with translating(f"reading rows of {schema.name}"), connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        row = fetch_one(connection, "SELECT pg_current_snapshot()::text", doing="asking for the snapshot")
        assert row is not None
        rows = _read(connection, schema, keys)
    written_by = rows.column(_WRITTEN_BY.name).to_numpy().astype(np.uint32)
    snapshot, position = SourceSnapshot.parse(row[0]), insert_position(connection)
    return SourceRead(schema, keys, rows.drop_columns([_WRITTEN_BY.name]), written_by, snapshot, position)


def _read(connection: Connection, schema: ReplicatedTableSchema, keys: pa.Table) -> pa.Table:
    decoder = CopyDecoder([*schema.columns, _WRITTEN_BY])
    if keys.num_rows == 0:
        return decoder.schema.empty_table()
    if not schema.key:
        raise SchemaError(
            f"rows of {schema.name} cannot be read by key",
            detail="the table has no key that the publication sends",
            hint="Give the table a primary key or REPLICA IDENTITY USING INDEX.",
        )
    found = fetch_all(connection, _TYPES, (schema.id,), doing=f"reading the columns of {schema.name}")
    types = {name: type for name, _, type in found}
    oids = {name: oid for name, oid, _ in found}
    missing = [column.name for column in schema.columns if oids.get(column.name) != column.type.oid]
    if missing:
        raise SchemaError(
            f"rows of {schema.name} can no longer be read under their schema",
            detail=f"columns {', '.join(missing)} are gone from the source, or have another type",
            hint="Nothing is to be done: the table is copied again.",
            retry=Retry.TIMED,
        )
    parameters = [_key_texts(schema, name, keys.column(name)) for name in schema.key]
    with connection.cursor().copy(_statement(schema, types), parameters) as copy:
        frames = np.frombuffer(b"".join(_frames(copy)), np.uint8)
    batch = decoder.decode(frames)
    if not decoder.ended:
        raise ProtocolError(f"COPY of {schema.name} stopped without its trailer")
    return decoder.schema.empty_table() if batch is None else pa.Table.from_batches([batch])


def _frames(blocks: Iterable[Any]) -> Iterable[bytes]:
    """The decoder reads frames as they are on the wire; psycopg has taken their headers off."""
    for block in blocks:
        yield b"d" + (len(block) + 4).to_bytes(4, "big")
        yield bytes(block)


def _statement(schema: ReplicatedTableSchema, types: dict[str, str]) -> sql.Composed:
    """A key asked for twice is answered once; only our side of the comparison is cast, so that an index serves it."""
    columns = [
        sql.SQL("s.{}" if column.type.binary else _OUTPUT).format(sql.Identifier(column.name))
        for column in schema.columns
    ]
    names = [sql.Identifier(f"k{i}") for i in range(len(schema.key))]
    casts = [
        # format_type quotes what needs quotes.
        sql.SQL("{}::{} AS {}").format(name, sql.SQL(types[key]), name)
        for name, key in zip(names, schema.key, strict=True)
    ]
    matches = [
        sql.SQL("s.{} = k.{}").format(sql.Identifier(key), name) for name, key in zip(names, schema.key, strict=True)
    ]
    return sql.SQL(
        "COPY (SELECT {columns}, s.xmin::text::int8 FROM {table} AS s "
        "JOIN (SELECT DISTINCT {casts} FROM unnest({arrays}) AS t({names})) AS k ON {matches}) "
        "TO STDOUT (FORMAT binary)"
    ).format(
        columns=sql.SQL(", ").join(columns),
        table=sql.Identifier(schema.name.namespace, schema.name.name),
        casts=sql.SQL(", ").join(casts),
        arrays=sql.SQL(", ").join([sql.SQL("%s::text[]")] * len(names)),
        names=sql.SQL(", ").join(names),
        matches=sql.SQL(" AND ").join(matches),
    )


def _key_texts(schema: ReplicatedTableSchema, name: str, values: pa.ChunkedArray) -> list[str | None]:
    try:
        return [_key_text(value) for value in values.to_pylist()]
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueOutOfRange(
            f"a key of {schema.name} cannot be looked up in the source",
            detail=f"column {name!r} holds a value of {values.type} that has no plain text form",
            hint="Copy the table again with `headwater resync`.",
        ) from error


def _key_text(value: Any) -> str | None:
    """A key's value as text that Postgres reads back to the same value."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, int | float | Decimal):
        return str(value)
    raise TypeError(type(value).__name__)
