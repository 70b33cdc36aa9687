"""Current rows of the source by key, for the rare change whose value is neither in the stream nor in the lake (invariant 12).

Small counts only: one COPY through the decoder that copy and stream use, so that a value read again is the
value they gave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from psycopg import sql
from psycopg.rows import dict_row

from headwater.errors import ProtocolError, Retry, SchemaError, StartAgain, ValueOutOfRange
from headwater.events import SourceRead, SourceSnapshot
from headwater.schema.table import ColumnSchema, ReplicatedTableSchema, TableName
from headwater.schema.types import BUILT_IN
from headwater.source.catalog_look import insert_position
from headwater.source.partitions import PARTITION_TREE, locks_to_read, relation_storages
from headwater.source.pg_types import TEXT_FORM
from headwater.source.same_relation import after_reading, require_same
from headwater.source.server import locks_for
from headwater.source.session import Connection, connect, fetch_all, fetch_one, impatient, translating
from headwater.wire.copy_binary import CopyDecoder
from headwater.wire.settings import ConnectSettings

log = logging.getLogger(__name__)

# The type modifier is left out: without one, -1 gives bpchar where NULL would give character, which is character(1).
#
# `is_closed`: reading a value of the type from text runs code of Postgres and of extensions alone. Values of composite and range
# types, and of arrays of them, are read by the types inside, and a domain among those runs its CHECK: the function of an owner.
_TYPES = """
WITH RECURSIVE base(attname, declared, oid) AS (
    SELECT attname::text, atttypid, atttypid FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT base.attname, base.declared, t.typbasetype FROM base JOIN pg_type t ON t.oid = base.oid WHERE t.typtype = 'd'
)
SELECT base.attname, base.declared::bigint, format_type(base.oid, -1),
       base.oid < 16384 OR (t.typtype IN ('b', 'e') AND t.typelem = 0) AS is_closed
FROM base JOIN pg_type t ON t.oid = base.oid WHERE t.typtype <> 'd'
"""
_RELATION = """
SELECT n.nspname::text, c.relname::text, c.relkind::text, pg_current_snapshot()::text, pg_is_in_recovery()
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s
"""
_LEAVES = (
    PARTITION_TREE
    + """
SELECT t.oid::bigint, n.nspname::text, c.relname::text
FROM tree t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE t.relkind <> 'p' ORDER BY t.oid
"""
)
_READERS = 8
"""Tables of a batch are written side by side, and each may read."""
_LOCK_SECONDS = 5.0
"""How long a batch of all tables may wait for a statement that has one of them locked in ACCESS EXCLUSIVE mode."""

# No column of a table can have this name.
_WRITTEN_BY = ColumnSchema("xmin", BUILT_IN[20])


def read_rows(connection: Connection, schema: ReplicatedTableSchema, keys: pa.Table) -> SourceRead:
    """The rows that have one of the keys now, all replicated columns; keys that are gone are missing in the answer."""
    doing = f"reading rows of {schema.name}"
    table = _table(connection, schema)
    storages = relation_storages(connection, [schema.id])
    with impatient(connection, _LOCK_SECONDS), translating(doing), connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        # Before the snapshot is taken: the rows of a table that is rewritten behind it would look deleted. A lock on a
        # partitioned table does not prevent that a partition is rewritten, hence the storages.
        connection.execute(sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(table.name))
        under_lock = _table(connection, schema)
        if under_lock.name != table.name:
            raise _not_the_same(schema, "it was renamed meanwhile")
        rows = _read(connection, schema, table, keys)
        _require_relation(connection, schema, under_lock.named, schema.id)
        if relation_storages(connection, [schema.id]) != storages:
            raise _not_the_same(schema, "it, or a partition of it, was rewritten meanwhile")
    written_by = rows.column(_WRITTEN_BY.name).to_numpy().astype(np.uint32)
    position = insert_position(connection)
    return SourceRead(schema, keys, rows.drop_columns([_WRITTEN_BY.name]), written_by, under_lock.snapshot, position)


@dataclass(frozen=True, slots=True)
class _Table:
    """The table by its oid: it may have been renamed, and its name may be another table's now."""

    named: TableName
    with_children: bool
    """Rows of a partitioned table lie in its leaves; those of tables that inherit from a plain one are not its own."""
    snapshot: SourceSnapshot

    @property
    def name(self) -> sql.Identifier:
        return sql.Identifier(self.named.namespace, self.named.name)


def _table(connection: Connection, schema: ReplicatedTableSchema) -> _Table:
    row = fetch_one(connection, _RELATION, (schema.id,), doing=f"looking for table {schema.name}")
    if row is None:
        raise _not_the_same(schema, "it was dropped")
    namespace, name, kind, text, in_recovery = row
    snapshot = SourceSnapshot.parse(text)
    if in_recovery:
        # A standby does not list what runs: all from the first on may.
        snapshot = SourceSnapshot(snapshot.first_running, snapshot.first_running)
    return _Table(TableName(namespace, name), kind == "p", snapshot)


def _require_relation(connection: Connection, schema: ReplicatedTableSchema, name: TableName, oid: int) -> None:
    """What was read was this relation: its name may have led to another one, if only for a moment."""
    cursor = connection.cursor(row_factory=dict_row)
    found = cursor.execute(after_reading(name, oid).encode()).fetchone()
    assert found is not None
    try:
        require_same(schema.name, None, found)
    except StartAgain as error:
        raise _not_the_same(schema, error.detail) from error


def _not_the_same(schema: ReplicatedTableSchema, detail: str) -> SchemaError:
    return SchemaError(
        f"rows of {schema.name} can no longer be read under their schema",
        detail=detail,
        hint="No action is needed: the table is copied again.",
        retry=Retry.TIMED,
    )


def _read(connection: Connection, schema: ReplicatedTableSchema, table: _Table, keys: pa.Table) -> pa.Table:
    if keys.num_rows == 0:
        return _empty(schema)
    if not schema.key:
        raise SchemaError(
            f"rows of {schema.name} cannot be read by key",
            detail="the table has no key that the publication sends",
            hint="Give the table a primary key or REPLICA IDENTITY USING INDEX.",
        )
    found = fetch_all(connection, _TYPES, (schema.id,), doing=f"reading the columns of {schema.name}")
    types = {name: type if is_closed else None for name, _, type, is_closed in found}
    oids = {name: oid for name, oid, *_ in found}
    missing = [column.name for column in schema.columns if oids.get(column.name) != column.type.oid]
    if missing:
        raise _not_the_same(schema, f"columns {', '.join(missing)} were dropped or have another type now")
    rows = sql.SQL(_key_rows(schema, types, keys))

    def read(source: sql.Composable) -> pa.Table:
        return _read_from(connection, schema, _statement(schema, source, types, rows))

    if not table.with_children:
        return read(sql.SQL("ONLY {}").format(table.name))
    if locks_to_read(connection, schema.id) <= locks_for(connection, _READERS):
        return read(table.name)
    return pa.concat_tables([_empty(schema), *_read_leaves(connection, schema, read)])


def _read_leaves(
    connection: Connection, schema: ReplicatedTableSchema, read: Callable[[sql.Composable], pa.Table]
) -> Iterator[pa.Table]:
    """One leaf after the other, at the same snapshot and with the locks of one at a time: a savepoint releases them."""
    for oid, namespace, name in fetch_all(
        connection, _LEAVES, {"tops": [schema.id]}, doing=f"listing the partitions of {schema.name}"
    ):
        leaf = TableName(namespace, name)
        connection.execute("SAVEPOINT one_leaf")
        yield read(sql.SQL("ONLY {}").format(sql.Identifier(namespace, name)))
        _require_relation(connection, schema, leaf, oid)
        connection.execute("ROLLBACK TO SAVEPOINT one_leaf; RELEASE SAVEPOINT one_leaf")


def _read_from(connection: Connection, schema: ReplicatedTableSchema, statement: sql.Composed) -> pa.Table:
    decoder = _decoder(schema)
    with connection.cursor().copy(statement) as copy:
        frames = np.frombuffer(b"".join(_frames(copy)), np.uint8)
    batch = decoder.decode(frames)
    if not decoder.ended:
        raise ProtocolError(f"COPY of {schema.name} stopped without its trailer")
    return _empty(schema) if batch is None else pa.Table.from_batches([batch])


def _decoder(schema: ReplicatedTableSchema) -> CopyDecoder:
    return CopyDecoder([*schema.columns, _WRITTEN_BY])


def _empty(schema: ReplicatedTableSchema) -> pa.Table:
    return _decoder(schema).schema.empty_table()


def _frames(blocks: Iterable[Any]) -> Iterable[bytes]:
    """The decoder reads frames as they are on the wire; psycopg has taken their headers off."""
    for block in blocks:
        yield b"d" + (len(block) + 4).to_bytes(4, "big")
        yield bytes(block)


def _key_rows(schema: ReplicatedTableSchema, types: Mapping[str, str | None], keys: pa.Table) -> str:
    """What stands behind VALUES. It runs nothing that the source's owners wrote: a literal is read by its type's own input
    function, where a cast of a text could be a function that CREATE CAST names; of a domain the type is the base, so its CHECK
    does not run. Of the types that have others inside (None) the text is compared.
    """
    columns = [
        # format_type quotes what needs quotes.
        [f"{_literal(text)}::{types[name] or 'text'}" for text in _key_texts(schema, name, keys.column(name))]
        for name in schema.key
    ]
    return ", ".join(f"({', '.join(row)})" for row in zip(*columns, strict=True))


def _literal(text: str | None) -> str:
    """One literal for each of a hundred thousand keys: psycopg's own would take ten seconds."""
    return "NULL" if text is None else "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _statement(
    schema: ReplicatedTableSchema, source: sql.Composable, types: Mapping[str, str | None], rows: sql.SQL
) -> sql.Composed:
    """A key asked for twice is answered once. The column of the source is compared as it is, so that an index serves it, unless
    its text has to be.

    Without parameters, with which psycopg would read a percent sign in a name as one.
    """
    columns = [
        sql.SQL("{0}" if column.type.binary else TEXT_FORM).format(sql.Identifier("s", column.name))
        for column in schema.columns
    ]
    names = [sql.Identifier(f"k{i}") for i in range(len(schema.key))]
    matches = [
        sql.SQL("{} = k.{}").format(sql.SQL("{0}" if types[key] else TEXT_FORM).format(sql.Identifier("s", key)), name)
        for name, key in zip(names, schema.key, strict=True)
    ]
    return sql.SQL(
        "COPY (SELECT {columns}, s.xmin::text::int8 FROM {source} AS s "
        "JOIN (SELECT DISTINCT {names} FROM (VALUES {rows}) AS t({names})) AS k ON {matches}) "
        "TO STDOUT (FORMAT binary)"
    ).format(
        columns=sql.SQL(", ").join(columns),
        source=source,
        names=sql.SQL(", ").join(names),
        rows=rows,
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


def source_rows_reader(settings: ConnectSettings) -> Callable[[ReplicatedTableSchema, pa.Table], SourceRead]:
    """The same for a destination, which has no session of its own. May be called from several threads."""

    def read(schema: ReplicatedTableSchema, keys: pa.Table) -> SourceRead:
        with connect(settings, application_name="headwater_reread") as connection:
            found = read_rows(connection, schema, keys)
        log.info("read %d rows of %s from the source for unchanged values", keys.num_rows, schema.name)
        return found

    return read
