"""What the preflight needs to know of each published table: rights, row security, identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.schema.table import ReplicaIdentity, TableId, TableName
from headwater.source.catalog import load_table_schemas
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


_RIGHTS = """
SELECT wanted.oid::bigint, has_schema_privilege(c.relnamespace, 'USAGE'),
       bool_and(has_table_privilege(part.oid, 'SELECT')
                OR (SELECT bool_and(has_column_privilege(part.oid, a.attnum, 'SELECT'))
                    FROM pg_attribute a
                    WHERE a.attrelid = part.oid AND a.attname = ANY (string_to_array(wanted.columns, chr(1))))),
       bool_or(row_security_active(part.oid)),
       (SELECT count(*) FROM pg_attribute a
        WHERE a.attrelid = wanted.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> '')
FROM unnest(%s::oid[], %s::text[]) AS wanted(oid, columns)
JOIN pg_class c ON c.oid = wanted.oid
CROSS JOIN LATERAL (
    SELECT c.oid UNION SELECT relid FROM pg_partition_tree(c.oid) WHERE c.relkind = 'p'
) AS part(oid)
GROUP BY wanted.oid, 2
"""


def table_facts(connection: Connection, publication: str, table_ids: Sequence[TableId]) -> list[TableFacts]:
    schemas = load_table_schemas(connection, table_ids, publication)
    # An array of arrays must be rectangular, so each table's columns travel as one text.
    columns = ["\x01".join(column.name for column in schema.columns) for schema in schemas.values()]
    rows = fetch_all(connection, _RIGHTS, (list(schemas), columns), doing="looking at the rights on tables")
    facts = []
    for oid, usage, readable, row_security, generated in rows:
        schema = schemas[TableId(oid)]
        table = schema.table_schema
        published = {column.name for column in schema.columns}
        if table.replica_identity is ReplicaIdentity.FULL:
            has_identity = True
            # From 18 on a generated column that is not published makes UPDATE fail here; before, it didn't count.
            expendable = generated if connection.info.server_version < 180000 else 0
            complete = len(published) >= len(table.columns) - expendable
        else:
            key = table.identity_columns if table.replica_identity is ReplicaIdentity.INDEX else table.primary_key
            has_identity = bool(key) and table.replica_identity is not ReplicaIdentity.NOTHING
            complete = published.issuperset(key)
        facts.append(TableFacts(schema.name, usage, bool(readable), row_security, has_identity, complete))
    return sorted(facts, key=lambda fact: fact.name)
