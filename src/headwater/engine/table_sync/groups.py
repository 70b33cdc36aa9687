"""Which tables are copied together. Pure: sizes in, groups out.

A small table costs less to read than its slot, its snapshot and its Spark job do, so small tables share them. A large
table has a worker to itself, and so has one that is suspected of keeping others back.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable

from headwater.schema.table import TableId
from headwater.source.publication import PublishedTable

SMALL_TABLE_BYTES = 8 << 20
"""About what one task reads in a quarter of a second: the price of a job of its own."""
GROUP_BYTES = 32 << 20
GROUP_TABLES = 64
"""Few enough that a failure of what they share concerns few tables."""
HELD_BYTES = 64 << 20
"""What a group may hold in memory. Rows in columns take about the room they take in the heap; but TOAST is compressed."""


def form_groups(
    tables: Iterable[PublishedTable], alone: Container[TableId] = (), most_relations: int | None = None
) -> list[tuple[PublishedTable, ...]]:
    """Large tables and those in `alone` by themselves, the others in groups; what takes longest first.

    The tables of a group are locked together, with their partitions: no more than `most_relations` of them.
    """
    single: list[tuple[PublishedTable, ...]] = []
    groups: list[list[PublishedTable]] = []
    filled = relations = 0
    most = most_relations if most_relations is not None else sys.maxsize
    for table in sorted(tables, key=lambda table: (table.relation_bytes, table.id)):
        if table.id in alone or table.relation_bytes > SMALL_TABLE_BYTES or table.relation_count > most:
            single.append((table,))
            continue
        is_full = filled + table.relation_bytes > GROUP_BYTES or relations + table.relation_count > most
        if not groups or len(groups[-1]) >= GROUP_TABLES or is_full:
            groups.append([])
            filled = relations = 0
        groups[-1].append(table)
        filled += table.relation_bytes
        relations += table.relation_count
    units = [*single, *(tuple(group) for group in groups)]
    return sorted(units, key=lambda unit: -sum(table.relation_bytes for table in unit))
