"""Why a table is in a publication, and whether it has been all along.

A table that left and came back looks the same as one that stayed, but the changes in between were never published. The
catalog tells them apart: leaving and coming back makes a new row in pg_publication_rel, pg_publication_namespace,
pg_publication or pg_inherits. All of it is one cheap statement that reads only the catalog, asked every few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.schema.table import TableId, TableName
from headwater.source.publication import OWN_NAMESPACE, published_relations
from headwater.source.session import Connection, fetch_all

_SEPARATOR = "|"


@dataclass(frozen=True, slots=True)
class Membership:
    """What makes a table a member, and on what terms. `str()` is what the store remembers of it."""

    id: TableId
    name: TableName
    ties: frozenset[str]
    """The catalog rows that each make it a member by themselves."""
    operations: str
    row_filter: str
    """A digest, of the expression as stored: a renamed column leaves it as it is."""
    columns: str
    nodes: frozenset[str] = frozenset()
    """Everything below a partitioned table, by oid and by the transaction that attached it."""
    born: frozenset[str] = frozenset()
    """Those of the nodes that were made as partitions, hence empty, and not attached with rows in them."""

    def __str__(self) -> str:
        return _SEPARATOR.join((self.operations, self.row_filter, self.columns, " ".join(sorted(self.ties))))

    def continues(self, before: Membership | str) -> bool:
        """Whether all changes since `before` were published, so that a copy of then is still good.

        What was below a partitioned table is known only to the running pipeline: a partition that is attached with rows,
        or detached, changes what the root holds without a change in the stream.
        """
        if isinstance(before, Membership):
            joined = self.nodes - before.nodes
            if before.nodes - self.nodes or joined - self.born:
                return False
        operations, row_filter, columns, ties = str(before).split(_SEPARATOR)
        return (
            set(self.operations) <= set(operations)
            and (self.row_filter, self.columns) == (row_filter, columns)
            and not self.ties.isdisjoint(ties.split())
        )


_MEMBERS = """
WITH published AS MATERIALIZED ({published})
SELECT c.oid::bigint, n.nspname::text, c.relname::text,
       ARRAY(SELECT 'all:' || p.oid WHERE p.puballtables
             UNION ALL
             SELECT 'table:' || r.oid || path.attached FROM pg_publication_rel r
             WHERE r.prpubid = p.oid AND r.prrelid = ANY (path.oids)
             {by_namespace}),
       concat(CASE WHEN p.pubinsert THEN 'i' END, CASE WHEN p.pubupdate THEN 'u' END,
              CASE WHEN p.pubdelete THEN 'd' END, CASE WHEN p.pubtruncate THEN 't' END),
       md5(published.qual::text), {columns},
       below.nodes, below.born
FROM pg_publication p
CROSS JOIN published
JOIN pg_class c ON c.oid = published.relid
JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (
    SELECT array_agg(up.oid) AS oids,
           coalesce(string_agg(':' || i.inhparent || '@' || i.xmin, '' ORDER BY i.inhrelid), '') AS attached
    FROM (SELECT c.oid UNION SELECT relid FROM pg_partition_ancestors(c.oid) WHERE c.relispartition) AS up(oid)
    LEFT JOIN pg_inherits i ON i.inhrelid = up.oid AND c.relispartition
) AS path
CROSS JOIN LATERAL (
    SELECT array_agg(node) AS nodes, array_agg(node) FILTER (WHERE is_born) AS born
    FROM (SELECT t.relid::oid || '@' || i.xmin AS node, y.xmin = i.xmin AS is_born
          FROM pg_partition_tree(c.oid) t
          JOIN pg_inherits i ON i.inhrelid = t.relid
          JOIN pg_type y ON y.typrelid = t.relid
          WHERE c.relkind = 'p' AND t.relid <> c.oid) AS nodes
) AS below
WHERE p.pubname = %(publication)s AND n.nspname <> ALL (%(excluded)s) AND n.nspname NOT LIKE 'pg\\_%%'
"""
_BY_NAMESPACE = """
             UNION ALL
             SELECT 'schema:' || s.oid || path.attached FROM pg_publication_namespace s
             JOIN pg_class u ON u.oid = ANY (path.oids) AND u.relnamespace = s.pnnspid
             WHERE s.pnpubid = p.oid"""
_COLUMNS = "(SELECT r.prattrs::text FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = c.oid)"


def memberships(connection: Connection, publication: str) -> dict[TableId, Membership]:
    """All members with what makes them members; nothing of our own namespace (invariant 9)."""
    newer = connection.info.server_version >= 150000
    query = _MEMBERS.replace("{published}", published_relations(connection.info.server_version))
    query = query.replace("{by_namespace}", _BY_NAMESPACE if newer else "")
    query = query.replace("{columns}", _COLUMNS if newer else "NULL::text")
    rows = fetch_all(
        connection,
        query,
        {"publication": publication, "excluded": [OWN_NAMESPACE, "information_schema"]},
        doing="looking at the publication",
    )
    found = {}
    for oid, namespace, name, ties, operations, row_filter, columns, nodes, born in rows:
        found[TableId(oid)] = Membership(
            id=TableId(oid),
            name=TableName(namespace, name),
            ties=frozenset(ties),
            operations=operations,
            row_filter=row_filter or "",
            columns=columns or "",
            nodes=frozenset(nodes or ()),
            born=frozenset(born or ()),
        )
    return found
