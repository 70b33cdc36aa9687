"""How a table is read in pieces: ctid ranges, planned while a lock keeps every rewriting statement out (invariant 1).

A plan is data: complete COPY statements and estimates. It knows neither Spark nor how the bytes are read. The first
range of a relation is open below and the last open above, so blocks that the relation grows by after planning are read too;
the exported snapshot decides which of their rows are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from headwater.errors import Retry, SchemaError
from headwater.schema.table import ColumnSchema, ReplicatedTableSchema, TableId, TableName, quote_identifier
from headwater.source.copy_origin import SERVER_STARTED_AT, CopyOrigin
from headwater.source.partitions import PARTITION_TREE
from headwater.source.pg_types import TEXT_FORM
from headwater.source.session import Connection, fetch_all, fetch_one

# About two seconds of one connection: 0.4 to 0.8 million rows/s of 80 to 100 bytes of heap.
TARGET_RANGE_BYTES = 64 << 20
# Below this a range costs more to start (a connection, a Python task) than to read.
MIN_RANGE_BYTES = 8 << 20
MAX_RANGES = 10_000


class CopiedTable(Protocol):
    """What a plan has to know of a published table."""

    @property
    def id(self) -> TableId: ...
    @property
    def name(self) -> TableName: ...
    @property
    def row_filter(self) -> str | None:
        """The publication's condition on this table, as pg_publication_tables prints it."""
        ...

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns the publication sends; None for all."""
        ...


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Blocks of one relation, as the statement that reads them."""

    relation: TableName
    sql: str
    estimated_bytes: int
    oid: int = 0
    storage: int = 0
    """The relfilenode that it was planned with: blocks of another one are not these."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    table_id: TableId
    name: TableName
    server_started_at: str
    select_list: str
    ranges: tuple[CopyRange, ...]
    target_range_bytes: int = TARGET_RANGE_BYTES

    @property
    def estimated_bytes(self) -> int:
        return sum(r.estimated_bytes for r in self.ranges)

    def tasks(self, most: int | None = None) -> tuple[tuple[CopyRange, ...], ...]:
        """The ranges as units of work: small leaves share one, and `most` caps how many there are.

        A thousand nearly empty leaves would otherwise cost a thousand connections.
        """
        tasks: list[list[CopyRange]] = []
        filled = 0
        for copy_range in self.ranges:
            if not tasks or filled + copy_range.estimated_bytes > self.target_range_bytes:
                tasks.append([])
                filled = 0
            tasks[-1].append(copy_range)
            filled += copy_range.estimated_bytes
        if most is not None and len(tasks) > most:
            tasks = [[r for task in tasks[first::most] for r in task] for first in range(most)]
        return tuple(tuple(task) for task in tasks)


@dataclass(frozen=True, slots=True)
class SmallTable:
    """A table that one task reads whole, with others: all that the task has to know of it."""

    id: TableId
    origin: CopyOrigin
    ranges: tuple[CopyRange, ...]

    @property
    def estimated_bytes(self) -> int:
        return sum(r.estimated_bytes for r in self.ranges)


@dataclass(frozen=True, slots=True)
class Heap:
    """A heap to read: the table itself, or a leaf of a partitioned one."""

    name: TableName
    blocks: int
    block_bytes: int
    toast_bytes: int = 0
    kind: str = "r"
    oid: int = 0
    storage: int = 0

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes + self.toast_bytes


def plan_copy(
    connection: Connection,
    table: CopiedTable,
    schema: ReplicatedTableSchema,
    *,
    target_range_bytes: int = TARGET_RANGE_BYTES,
    max_ranges: int = MAX_RANGES,
    parallelism: int = 1,
    leaves_are_locked: bool = True,
) -> CopyPlan:
    """Plan on the session that holds the lock, after the slot was made: a leaf attached since then belongs to the copy.

    `parallelism` is how many ranges are read at once. Leaves that are not locked are not opened to be measured: that could wait
    for a session that has one of them locked and that itself waits for a lock of ours.
    """
    _check_columns(table, schema)
    heaps = _heaps(connection, table, leaves_are_locked)
    total = sum(heap.bytes for heap in heaps)
    target = range_bytes(total, target_range_bytes, max(1, max_ranges - len(heaps)), parallelism)
    columns = select_list(schema.columns)
    ranges = tuple(r for heap in heaps for r in split_heap(heap, columns, table.row_filter, target))
    return CopyPlan(
        table_id=table.id,
        name=table.name,
        server_started_at=server_started_at(connection),
        select_list=columns,
        ranges=ranges,
        target_range_bytes=target,
    )


def range_bytes(total: int, target: int, most: int, parallelism: int) -> int:
    """How large ranges should be: full rounds of `parallelism`, so that no core waits for the last one alone."""
    least = min(MIN_RANGE_BYTES, target)
    if total <= least:
        return least
    rounds = -(-total // (target * parallelism))
    count = min(rounds * parallelism, most, -(-total // least))
    return -(-total // count)


def server_started_at(connection: Connection) -> str:
    row = fetch_one(connection, SERVER_STARTED_AT, doing="asking when the server was started")
    assert row is not None
    return str(row[0])


def split_heap(heap: Heap, columns: str, row_filter: str | None, target_bytes: int) -> list[CopyRange]:
    """Equal ranges of at most `target_bytes`, TOAST included: a few blocks may point to gigabytes of it."""
    count = max(1, min(heap.blocks, -(-heap.bytes // target_bytes)))
    bounds = [heap.blocks * i // count for i in range(count + 1)]
    ranges = []
    for i, (first, end) in enumerate(pairwise(bounds)):
        lower = first if i > 0 else None
        upper = end if i < count - 1 else None
        sql = copy_statement(heap.name, columns, row_filter, lower, upper)
        ranges.append(CopyRange(heap.name, sql, heap.bytes // count, heap.oid, heap.storage))
    return ranges


def copy_statement(
    name: TableName, columns: str, row_filter: str | None, first_block: int | None, end_block: int | None
) -> str:
    conditions = []
    if first_block is not None:
        conditions.append(f"ctid >= '({first_block},0)'::tid")
    if end_block is not None:
        conditions.append(f"ctid < '({end_block},0)'::tid")
    if row_filter:
        conditions.append(f"({row_filter})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"COPY (SELECT {columns} FROM ONLY {name.quoted}{where}) TO STDOUT (FORMAT binary)"


def select_list(columns: Sequence[ColumnSchema]) -> str:
    """The columns by name, for a leaf may have them in another order than its root."""
    return ", ".join(_selected(column) for column in columns)


def _selected(column: ColumnSchema) -> str:
    name = quote_identifier(column.name)
    return name if column.type.binary else TEXT_FORM.format(name)


def _check_columns(table: CopiedTable, schema: ReplicatedTableSchema) -> None:
    if not schema.columns:
        raise SchemaError(
            f"table {table.name} has no column to copy",
            detail="The publication sends none of the table's columns.",
            hint="Add a column to the table, or drop the table from the publication.",
        )
    if table.columns is None:
        return
    unpublished = [column.name for column in schema.columns if column.name not in set(table.columns)]
    if unpublished:
        raise SchemaError(
            f"table {table.name} has columns in its schema that the publication does not send",
            detail=f"They would be copied and never be updated afterwards: {', '.join(unpublished)}.",
            hint="The publication's column list changed while the copy was prepared; the copy is retried.",
            retry=Retry.TIMED,
        )


_HEAPS = """
SELECT n.nspname, c.relname, c.relkind,
       {size},
       current_setting('block_size')::int, c.oid::bigint, c.relfilenode::bigint
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
"""
_MEASURED = """
       CASE WHEN c.relkind IN ('r', 'm') THEN pg_relation_size(c.oid, 'main') ELSE 0 END,
       CASE WHEN c.reltoastrelid <> 0 THEN pg_relation_size(c.reltoastrelid, 'main') ELSE 0 END
"""
# As the last VACUUM or ANALYZE saw it, and never taken for empty: it was not measured. It decides where ranges are cut, not what
# is read: the first has no beginning and the last no end.
_ESTIMATED = """
       greatest(c.relpages, 1)::bigint * current_setting('block_size')::int,
       (SELECT greatest(t.relpages, 0) FROM pg_class t WHERE t.oid = c.reltoastrelid)::bigint * current_setting('block_size')::int
"""
_ITSELF = _HEAPS.replace("{size}", _MEASURED) + "WHERE c.oid = %s"
_LEAVES = PARTITION_TREE + _HEAPS + "JOIN tree t ON t.oid = c.oid AND t.relkind <> 'p' ORDER BY c.oid"

_KINDS = {"f": "a foreign table", "v": "a view", "m": "a materialized view", "S": "a sequence", "c": "a composite type"}


def _heaps(connection: Connection, table: CopiedTable, leaves_are_locked: bool) -> list[Heap]:
    rows = fetch_all(connection, _ITSELF, (table.id,), doing=f"planning the copy of {table.name}")
    if not rows:
        raise SchemaError(
            f"table {table.name} does not exist",
            detail=f"No relation has the oid {table.id} any more.",
            hint="It was dropped; the pipeline removes it when it reads the publication the next time.",
            retry=Retry.TIMED,
        )
    if rows[0][2] == "p":
        rows = fetch_all(
            connection,
            _LEAVES.replace("{size}", _MEASURED if leaves_are_locked else _ESTIMATED),
            {"tops": [table.id]},
            doing=f"planning the copy of {table.name}",
        )
    heaps = []
    for namespace, name, kind, heap_bytes, toast_bytes, block_bytes, oid, storage in rows:
        blocks = heap_bytes // block_bytes
        heap = Heap(TableName(namespace, name), blocks, block_bytes, toast_bytes or 0, kind, oid, storage)
        if kind != "r":
            raise SchemaError(
                f"{heap.name} cannot be copied",
                detail=f"It is {_KINDS.get(kind, f'of kind {kind!r}')}: it has no blocks to read or sends no changes.",
                hint=f"Publish ordinary or partitioned tables only; the copy of {table.name} was asked for.",
            )
        heaps.append(heap)
    return heaps
