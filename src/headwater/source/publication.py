"""What a publication publishes: its operations, and its tables with row filter, column list and size.

The server's own function decides membership, so that FOR ALL TABLES, TABLES IN SCHEMA and publish_via_partition_root
mean what they mean there. The namespace `headwater` and the system's are left out whatever the publication says
(invariant 9).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import LiteralString

from headwater.errors import SourceError
from headwater.schema.table import TableId, TableName
from headwater.source.session import Connection, fetch_all, fetch_one

OWN_NAMESPACE = "headwater"
PARTITIONED = "p"


@dataclass(frozen=True, slots=True)
class PublicationFacts:
    name: str
    all_tables: bool
    insert: bool
    update: bool
    delete: bool
    truncate: bool
    via_partition_root: bool

    @property
    def missing_operations(self) -> tuple[str, ...]:
        operations = {"insert": self.insert, "update": self.update, "delete": self.delete, "truncate": self.truncate}
        return tuple(name for name, published in operations.items() if not published)


@dataclass(frozen=True, slots=True)
class PublishedTable:
    id: TableId
    name: TableName
    row_filter: str | None
    columns: tuple[str, ...] | None
    """The publication's column list; None where all columns are published."""
    estimated_rows: int | None
    """As the planner believes; None where the table was never analysed."""
    relation_bytes: int
    """Heap and TOAST, of all leaves for a partitioned table."""
    relkind: str

    @property
    def is_partitioned(self) -> bool:
        return self.relkind == PARTITIONED


def publication_facts(connection: Connection, publication: str) -> PublicationFacts:
    """The publication's settings; SourceError with a hint if there is no such publication."""
    row = fetch_one(
        connection,
        """SELECT puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
           FROM pg_publication WHERE pubname = %s""",
        (publication,),
        doing="looking for the publication",
    )
    if row is None:
        raise missing_publication(connection, publication)
    return PublicationFacts(publication, *row)


def missing_publication(connection: Connection, publication: str) -> SourceError:
    rows = fetch_all(
        connection, "SELECT pubname::text FROM pg_publication ORDER BY 1 LIMIT 10", doing="listing publications"
    )
    names = ", ".join(f'"{name}"' for (name,) in rows)
    quoted = publication.replace('"', '""')
    return SourceError(
        f'publication "{publication}" does not exist in database "{connection.info.dbname}"',
        detail=f"the database has {names}" if names else "the database has no publication at all",
        hint=f'Run CREATE PUBLICATION "{quoted}" FOR TABLE ...; (or FOR ALL TABLES), or correct publication_name.',
    )


def published_relations(version: int) -> LiteralString:
    """SELECT relid, attrs, qual of what the publication %(publication)s sends; the function grew with the versions."""
    if version < 150000:
        return """SELECT relid, NULL::int2[] AS attrs, NULL::pg_node_tree AS qual
                  FROM pg_get_publication_tables(%(publication)s)"""
    return "SELECT relid, attrs::int2[] AS attrs, qual FROM pg_get_publication_tables(%(publication)s)"


# From 16 on the function fills in attrs also where there is no column list: prattrs tells.
_TABLES = """
WITH published AS MATERIALIZED ({published})
SELECT c.oid::bigint, n.nspname::text, c.relname::text, pg_get_expr(published.qual, c.oid),
       {columns},
       size.estimated_rows, size.relation_bytes, c.relkind::text
FROM published
JOIN pg_class c ON c.oid = published.relid
JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (
    SELECT CASE WHEN bool_or(leaf.reltuples >= 0) THEN sum(greatest(leaf.reltuples, 0))::bigint END AS estimated_rows,
           coalesce(sum(pg_table_size(leaf.oid)), 0)::bigint AS relation_bytes
    FROM (SELECT c.oid WHERE c.relkind <> 'p'
          UNION ALL
          SELECT relid FROM pg_partition_tree(c.oid) WHERE c.relkind = 'p' AND isleaf) AS part(oid)
    JOIN pg_class leaf ON leaf.oid = part.oid
) AS size
WHERE n.nspname <> ALL (%(excluded)s) AND n.nspname NOT LIKE 'pg\\_%%'
ORDER BY 2, 3
"""
_NO_LIST = "NULL::text[]"
_LIST = """(SELECT array_agg(a.attname::text ORDER BY a.attnum)
            FROM pg_publication_rel r
            JOIN pg_publication p ON p.oid = r.prpubid AND p.pubname = %(publication)s
            JOIN pg_attribute a ON a.attrelid = r.prrelid AND a.attnum = ANY (r.prattrs::int2[])
            WHERE r.prrelid = c.oid AND r.prattrs IS NOT NULL)"""


def published_tables(connection: Connection, publication: str) -> list[PublishedTable]:
    """The tables whose changes the publication sends, by name; roots or leaves as publish_via_partition_root says."""
    publication_facts(connection, publication)
    version = connection.info.server_version
    query = _TABLES.replace("{published}", published_relations(version))
    query = query.replace("{columns}", _LIST if version >= 150000 else _NO_LIST)
    rows = fetch_all(
        connection,
        query,
        {"publication": publication, "excluded": [OWN_NAMESPACE, "information_schema"]},
        doing="reading the publication's tables",
    )
    return [
        PublishedTable(
            id=TableId(oid),
            name=TableName(namespace, name),
            row_filter=row_filter,
            columns=tuple(columns) if columns is not None else None,
            estimated_rows=estimated_rows,
            relation_bytes=relation_bytes,
            relkind=relkind,
        )
        for oid, namespace, name, row_filter, columns, estimated_rows, relation_bytes, relkind in rows
    ]
