"""What a publication publishes: its operations, and its tables with row filter, column list and size.

FOR ALL TABLES, TABLES IN SCHEMA and publish_via_partition_root mean what they mean in the server. The namespace `headwater` and
the system's are left out whatever the publication says (invariant 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

from headwater.errors import ServerError, SourceError
from headwater.schema.table import TableId, TableName
from headwater.source.session import LOCK_NOT_AVAILABLE, Connection, fetch_all, fetch_one, impatient

OWN_NAMESPACE = "headwater"
PARTITIONED = "p"
_PATIENCE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class PublicationOptions:
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
    """The planner's estimate; None where the table was never analyzed."""
    relation_bytes: int
    """Heap and TOAST, of all leaves for a partitioned table."""
    relkind: str
    relation_count: int = 1
    """With all partitions below it: what a lock on the whole table costs the server."""

    @property
    def is_partitioned(self) -> bool:
        return self.relkind == PARTITIONED


def publication_options(connection: Connection, publication: str) -> PublicationOptions:
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
    return PublicationOptions(publication, *row)


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


# Which tables a publication sends, from the catalog alone. The server has a function for it, but from 16 on that opens every
# table, so it waits for any session that has one of them locked: a VACUUM FULL of an hour would hide changes of all. For the
# same reason nothing here calls pg_partition_tree, which locks what it lists. A test compares this with the server's function.
#
# named: the relations that the publication names, each with what names it: a tie. Leaving and coming back makes a new row in
#   pg_publication_rel or pg_publication_namespace, or in pg_depend for a table that changes its namespace, hence a new tie.
# tree: named relations and everything below them. `path` has the row of pg_inherits of each step.
_MEMBERS = """
WITH RECURSIVE pub AS MATERIALIZED (
    SELECT p.oid, p.xmin::text AS version, p.pubowner AS owner, p.puballtables AS all_tables, p.pubviaroot AS via_root,
           concat(CASE WHEN p.pubinsert THEN 'i' END, CASE WHEN p.pubupdate THEN 'u' END,
                  CASE WHEN p.pubdelete THEN 'd' END, CASE WHEN p.pubtruncate THEN 't' END) AS operations,
           {generated} AS generated,
           p.ctid::text AS place, (SELECT max(every.ctid)::text FROM pg_publication every) AS last_place
    FROM pg_publication p WHERE p.pubname = %(publication)s
),
named(oid, relkind, tie) AS MATERIALIZED (
    SELECT c.oid, c.relkind, 'all:' || pub.oid
    FROM pub JOIN pg_class c ON pub.all_tables AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
    UNION ALL
    SELECT c.oid, c.relkind, 'table:' || r.oid || '@' || r.xmin
    FROM pub JOIN pg_publication_rel r ON r.prpubid = pub.oid JOIN pg_class c ON c.oid = r.prrelid
    {by_namespace}
),
tree(top, oid, relkind, path) AS (
    SELECT DISTINCT oid, oid, relkind, '' FROM named
    UNION ALL
    SELECT t.top, c.oid, c.relkind, t.path || ':' || i.inhparent || '@' || i.xmin
    FROM tree t
    JOIN pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending
    JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
    WHERE t.relkind = 'p'
),
members(relid, ties) AS MATERIALIZED (
    SELECT n.oid, array_agg(n.tie ORDER BY n.tie) FROM pub JOIN named n ON pub.via_root
    WHERE NOT EXISTS (SELECT FROM tree t WHERE t.oid = n.oid AND t.top <> t.oid)
    GROUP BY n.oid
    UNION ALL
    SELECT t.oid, array_agg(n.tie || t.path ORDER BY n.tie, t.path)
    FROM pub JOIN tree t ON NOT pub.via_root AND t.relkind <> 'p' JOIN named n ON n.oid = t.top
    JOIN pg_class c ON c.oid = t.oid AND c.relpersistence = 'p'
    GROUP BY t.oid
),
published AS (
    SELECT m.relid, m.ties, {attrs} AS attrs, {qual} AS qual
    FROM pub CROSS JOIN members m
    JOIN pg_class c ON c.oid = m.relid
    JOIN pg_namespace n ON n.oid = c.relnamespace
        AND n.nspname NOT IN ('headwater', 'information_schema') AND n.nspname NOT LIKE 'pg\\_%%'
    {listed}
    WHERE %(only)s::oid[] IS NULL OR m.relid = ANY (%(only)s::oid[])
)
"""
_BY_NAMESPACE = """UNION ALL
    SELECT c.oid, c.relkind, 'schema:' || s.oid || '@' || s.xmin || '@' || coalesce(d.xmin::text, '')
    FROM pub JOIN pg_publication_namespace s ON s.pnpubid = pub.oid
    JOIN pg_class c ON c.relnamespace = s.pnnspid AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
    LEFT JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.objsubid = 0
        AND d.refclassid = 'pg_namespace'::regclass AND d.refobjid = c.relnamespace"""
# A table whose namespace is published too is sent whole, whatever its own entry says.
_LISTED = """LEFT JOIN pg_publication_rel r ON r.prpubid = pub.oid AND r.prrelid = c.oid AND NOT EXISTS (
        SELECT FROM pg_publication_namespace s WHERE s.pnpubid = pub.oid AND s.pnnspid = c.relnamespace)"""


def published_relations(version: int) -> LiteralString:
    """WITH ... `pub`, `tree` and `published` (relid, ties, attrs, qual) of the publication %(publication)s; of the tables
    %(only)s, unless that is NULL.

    `attrs` is the column list, NULL where there is none; nothing of our own namespace or the system's (invariant 9).
    """
    newer = version >= 150000
    query = _MEMBERS.replace("{generated}", "p.pubgencols::text" if version >= 180000 else "'n'")
    query = query.replace("{by_namespace}", _BY_NAMESPACE if newer else "")
    query = query.replace("{attrs}", "r.prattrs::int2[]" if newer else "NULL::int2[]")
    query = query.replace("{qual}", "r.prqual" if newer else "NULL::pg_node_tree")
    return query.replace("{listed}", _LISTED if newer else "")


_TABLES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text,
       CASE WHEN published.qual IS NOT NULL THEN pg_get_expr(published.qual, c.oid) END,
       (SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum = ANY (published.attrs)),
       size.estimated_rows, size.relation_bytes, c.relkind::text,
       CASE WHEN c.relkind = 'p' THEN (SELECT count(*) FROM tree t WHERE t.top = c.oid) ELSE 1 END
FROM published
JOIN pg_class c ON c.oid = published.relid
JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (
    SELECT CASE WHEN bool_or(leaf.reltuples >= 0) THEN sum(greatest(leaf.reltuples, 0))::bigint END AS estimated_rows,
           coalesce(sum({bytes}), 0)::bigint AS relation_bytes
    FROM (SELECT c.oid WHERE c.relkind <> 'p'
          UNION ALL
          SELECT t.oid FROM tree t WHERE c.relkind = 'p' AND t.top = c.oid AND t.relkind <> 'p') AS part(oid)
    JOIN pg_class leaf ON leaf.oid = part.oid
    LEFT JOIN pg_class toast ON toast.oid = leaf.reltoastrelid
) AS size
ORDER BY 2, 3
"""
_SIZE = "pg_table_size(leaf.oid)"
# Of the last VACUUM or ANALYZE. The true size would open the table.
_ESTIMATED_SIZE = "(leaf.relpages + coalesce(toast.relpages, 0)) * current_setting('block_size')::bigint"


def published_tables(
    connection: Connection, publication: str, only: Sequence[TableId] | None = None
) -> list[PublishedTable]:
    """The tables whose changes the publication sends, by name; roots or leaves as publish_via_partition_root says.

    All of them, or `only` these: finding out how large a table is opens it and each of its partitions.

    Where another session has one of them locked, sizes are what the last VACUUM or ANALYZE saw.
    """
    publication_options(connection, publication)
    members = published_relations(connection.info.server_version)
    doing, parameters = "reading the publication's tables", {"publication": publication, "only": _oids(only)}
    try:
        with impatient(connection, _PATIENCE_SECONDS):
            rows = fetch_all(connection, members + _TABLES.replace("{bytes}", _SIZE), parameters, doing=doing)
    except ServerError as error:
        if error.sqlstate != LOCK_NOT_AVAILABLE:
            raise
        rows = fetch_all(connection, members + _TABLES.replace("{bytes}", _ESTIMATED_SIZE), parameters, doing=doing)
    return [
        PublishedTable(
            id=TableId(oid),
            name=TableName(namespace, name),
            row_filter=row_filter,
            columns=tuple(columns) if columns is not None else None,
            estimated_rows=estimated_rows,
            relation_bytes=relation_bytes,
            relkind=relkind,
            relation_count=relation_count,
        )
        for oid, namespace, name, row_filter, columns, estimated_rows, relation_bytes, relkind, relation_count in rows
    ]


def _oids(ids: Sequence[TableId] | None) -> list[int] | None:
    return None if ids is None else [int(id) for id in ids]
