"""What the preflight needs to know of each published table: rights, row security, identity, columns that are not sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.errors import SchemaError
from headwater.schema.leaves import NoCommonIdentity
from headwater.schema.table import ReplicaIdentity, ReplicatedTableSchema, TableId, TableName
from headwater.source.catalog import load_table_schemas
from headwater.source.catalog_look import read_fingerprints
from headwater.source.differences import leaf_identity
from headwater.source.fingerprint import Fingerprint
from headwater.source.leaves import no_common_identity, unlogged_leaf
from headwater.source.session import Connection, fetch_all


@dataclass(frozen=True, slots=True)
class TableFacts:
    name: TableName
    namespace_usage: bool
    readable: bool
    """SELECT on the published columns, of every leaf too: the copy reads leaves themselves."""
    row_security: bool
    has_identity: bool
    identity_published: bool
    leaves_differ: str = ""
    """Why the leaves have no identity in common."""
    unsent: tuple[str, ...] = ()
    """Generated columns that the publication does not send."""
    unlogged: SchemaError | None = None
    """That one of its leaves is."""
    part_of: TableName | None = None
    """The partitioned table that this is a leaf of, where leaves are published one by one."""


_RIGHTS = """
SELECT wanted.oid::bigint, has_schema_privilege(c.relnamespace, 'USAGE'),
       bool_and(has_table_privilege(wanted.part, 'SELECT')
                OR (SELECT bool_and(has_column_privilege(wanted.part, a.attnum, 'SELECT'))
                    FROM pg_attribute a
                    WHERE a.attrelid = wanted.part AND a.attname = ANY (string_to_array(wanted.columns, chr(1))))),
       bool_or(row_security_active(wanted.part)),
       (SELECT array_agg(ARRAY[n.nspname::text, p.relname::text] ORDER BY up.level) FROM (
            SELECT row_number() OVER () AS level, relid FROM pg_partition_ancestors(c.oid)) AS up
        JOIN pg_class p ON p.oid = up.relid JOIN pg_namespace n ON n.oid = p.relnamespace WHERE c.relispartition)
FROM unnest(%s::oid[], %s::oid[], %s::text[]) AS wanted(oid, part, columns)
JOIN pg_class c ON c.oid = wanted.oid
GROUP BY wanted.oid, c.oid, c.relnamespace, c.relispartition
"""


def table_facts(connection: Connection, publication: str, table_ids: Sequence[TableId]) -> list[TableFacts]:
    schemas, looked = load_table_schemas(connection, table_ids, publication), read_fingerprints(connection, publication)
    asked = []
    for id, schema in schemas.items():
        # An array of arrays must be rectangular, so each table's columns travel as one text.
        columns = "\x01".join(column.name for column in schema.columns)
        parts = looked[id].parts if id in looked else ()
        asked += [(id, part, columns) for part in (id, *(part.oid for part in parts))]
    parameters = tuple([list(column) for column in zip(*asked, strict=True)] or [[], [], []])
    rows = fetch_all(connection, _RIGHTS, parameters, doing="looking at the rights on tables")
    facts = []
    for oid, usage, readable, row_security, ancestors in rows:
        id = TableId(oid)
        schema, fingerprint = schemas[id], looked.get(id)
        has_identity, complete, differ = _identity(connection.info.server_version, schema, fingerprint)
        unsent = (
            [c.name for c in fingerprint.columns if c.generated and not fingerprint.replicates(c)]
            if fingerprint
            else []
        )
        root = TableName(*ancestors[-1]) if ancestors else None
        unlogged = unlogged_leaf(fingerprint) if fingerprint is not None else None
        facts.append(
            TableFacts(
                schema.name,
                usage,
                bool(readable),
                row_security,
                has_identity,
                complete,
                differ,
                tuple(unsent),
                unlogged,
                root,
            )
        )
    return sorted(facts, key=lambda fact: fact.name)


def _identity(version: int, schema: ReplicatedTableSchema, fingerprint: Fingerprint | None) -> tuple[bool, bool, str]:
    """Whether there is one, whether the publication sends all of it, and why the leaves have none in common."""
    table, published = schema.table_schema, {column.name for column in schema.columns}
    if fingerprint is not None and fingerprint.kind == "p":
        try:
            found = leaf_identity(fingerprint)
        except NoCommonIdentity as error:
            return True, True, no_common_identity(fingerprint, error).detail
        return bool(found.key) or found.old_is_full, published.issuperset(found.key), ""
    if table.replica_identity is ReplicaIdentity.FULL:
        # From 18 on a generated column that is not published makes UPDATE fail here; before, it didn't count.
        generated = sum(1 for c in fingerprint.columns if c.generated) if fingerprint is not None else 0
        return True, len(published) >= len(table.columns) - (generated if version < 180000 else 0), ""
    key = table.identity_columns if table.replica_identity is ReplicaIdentity.INDEX else table.primary_key
    return bool(key) and table.replica_identity is not ReplicaIdentity.NOTHING, published.issuperset(key), ""
