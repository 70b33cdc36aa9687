"""The partitions of a table, from the catalog alone.

pg_partition_tree() locks every relation that it lists, until the transaction ends: for a table with ten thousand partitions that
is more than fits into the lock table that all sessions of the server share.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.schema.table import TableId
from headwater.source.session import Connection, fetch_all, fetch_one

# tree(top, oid, relkind): the tables %(tops)s, each with all partitions below it.
PARTITION_TREE = """
WITH RECURSIVE tree(top, oid, relkind) AS (
    SELECT c.oid, c.oid, c.relkind FROM pg_class c WHERE c.oid = ANY (%(tops)s::oid[])
    UNION ALL
    SELECT t.top, c.oid, c.relkind
    FROM tree t
    JOIN pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending
    JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
    WHERE t.relkind = 'p'
)
"""

_LOCKS_TO_READ = (
    PARTITION_TREE
    + "SELECT count(*) + (SELECT count(*) FROM pg_index i WHERE i.indrelid IN (SELECT oid FROM tree)) FROM tree"
)


def locks_to_read(connection: Connection, table_id: TableId) -> int:
    """How many relations a statement locks that reads a whole table: the table, its partitions, and the indexes of all."""
    row = fetch_one(connection, _LOCKS_TO_READ, {"tops": [table_id]}, doing="counting partitions")
    assert row is not None
    return int(row[0])


# By the function: the column would be as the transaction's snapshot has it, this is as it is now.
_STORAGES = PARTITION_TREE + "SELECT oid::bigint, pg_relation_filenode(oid)::bigint FROM tree WHERE relkind <> 'p'"


def relation_storages(connection: Connection, table_ids: Sequence[TableId]) -> dict[int, int | None]:
    """The relfilenode of each table, or of each of its partitions that holds rows, by oid: another one after each rewrite."""
    rows = fetch_all(connection, _STORAGES, {"tops": list(table_ids)}, doing="looking at the storage of tables")
    return dict(rows)
