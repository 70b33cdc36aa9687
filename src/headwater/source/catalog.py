"""Tables as the catalog describes them: columns, identity, and what the publication sends of them.

One statement reads all tables asked for, so that a DDL statement between two reads never mixes two versions of a table.
The identity comes from the index, not from the flags of RELATION, which flags every column under REPLICA IDENTITY FULL
(invariant 13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.schema.table import (
    ColumnSchema,
    ReplicaIdentity,
    ReplicatedTableSchema,
    SnapshotId,
    TableId,
    TableName,
    TableSchema,
)
from headwater.source.pg_types import resolve_types
from headwater.source.publication import publication_options, published_relations
from headwater.source.session import Connection, fetch_all

# Indexes: a deferrable primary key identifies nothing within a transaction, and the server doesn't use it as identity
# either; INCLUDE columns (past indnkeyatts) are no part of the key.
_TABLES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relreplident::text,
       a.attnums, a.names, a.types, a.typmods, a.not_nulls, a.generated,
       (SELECT (i.indkey::int2[])[0:i.indnkeyatts - 1] FROM pg_index i
        WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate AND i.indisvalid),
       (SELECT (i.indkey::int2[])[0:i.indnkeyatts - 1] FROM pg_index i
        WHERE i.indrelid = c.oid AND i.indisreplident AND i.indisvalid),
       published.attrs, published.relid IS NOT NULL, (SELECT pub.generated FROM pub)
FROM unnest(%(tables)s::oid[]) AS wanted(oid)
JOIN pg_class c ON c.oid = wanted.oid
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN published ON published.relid = c.oid
CROSS JOIN LATERAL (
    SELECT array_agg(attnum::int ORDER BY attnum) AS attnums,
           array_agg(attname::text ORDER BY attnum) AS names,
           array_agg(atttypid::bigint ORDER BY attnum) AS types,
           array_agg(atttypmod ORDER BY attnum) AS typmods,
           array_agg(attnotnull ORDER BY attnum) AS not_nulls,
           array_agg(attgenerated::text ORDER BY attnum) AS generated
    FROM pg_attribute
    WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped
) AS a
"""

_UNVERSIONED = SnapshotId(0)


@dataclass(frozen=True, slots=True)
class _CatalogTable:
    oid: int
    namespace: str
    name: str
    replica_identity: str
    attnums: list[int] | None
    names: list[str]
    types: list[int]
    typmods: list[int]
    not_nulls: list[bool]
    generated: list[str]
    primary_key: list[int] | None
    identity_index: list[int] | None
    published_attnums: list[int] | None
    is_published: bool
    generated_published: str | None


def load_table_schemas(
    connection: Connection,
    table_ids: Sequence[TableId],
    publication: str,
    snapshot_id: SnapshotId = _UNVERSIONED,
) -> dict[TableId, ReplicatedTableSchema]:
    """The schemas of all tables that exist; one that was dropped meanwhile is missing in the answer.

    A table that is not in the publication (any more) gets the mask it would have without a column list.
    """
    if not table_ids:
        return {}
    publication_options(connection, publication)
    version = connection.info.server_version
    rows = fetch_all(
        connection,
        published_relations(version) + _TABLES,
        {"tables": list(table_ids), "publication": publication, "only": list(table_ids)},
        doing="reading tables from the catalog",
    )
    tables = [_CatalogTable(*row) for row in rows]
    types = resolve_types(connection, {oid for table in tables for oid in (table.types or ())})
    schemas = {}
    for table in tables:
        primary_key = frozenset(table.primary_key or ())
        columns = []
        for i, attnum in enumerate(table.attnums or ()):
            columns.append(
                ColumnSchema(
                    name=table.names[i],
                    type=types[table.types[i]],
                    typmod=table.typmods[i],
                    nullable=not table.not_nulls[i],
                    attnum=attnum,
                    primary_key=attnum in primary_key,
                )
            )
        identity, identity_columns = _identity(table, columns)
        schema = TableSchema(
            id=TableId(table.oid),
            name=TableName(table.namespace, table.name),
            columns=tuple(columns),
            snapshot_id=snapshot_id,
            replica_identity=identity,
            identity_columns=identity_columns,
        )
        schemas[schema.id] = ReplicatedTableSchema(schema, _mask(table, version))
    return schemas


def _identity(table: _CatalogTable, columns: Sequence[ColumnSchema]) -> tuple[ReplicaIdentity, tuple[str, ...]]:
    identity = ReplicaIdentity(table.replica_identity)
    if identity is not ReplicaIdentity.INDEX:
        return identity, ()
    if table.identity_index is None:
        # The index was dropped; the server keeps the setting and treats the table as one without identity.
        return ReplicaIdentity.NOTHING, ()
    wanted = frozenset(table.identity_index)
    return identity, tuple(column.name for column in columns if column.attnum in wanted)


def _mask(table: _CatalogTable, version: int) -> tuple[bool, ...]:
    """Generated columns are sent from 18 on: those that a column list names, or stored ones if the publication says so."""
    listed = frozenset(table.published_attnums) if table.published_attnums is not None else None
    generated_sent = version >= 180000 and (listed is not None or table.generated_published == "s")
    return tuple(
        (listed is None or attnum in listed) and (not generated or (generated == "s" and generated_sent))
        for attnum, generated in zip(table.attnums or (), table.generated or (), strict=True)
    )
