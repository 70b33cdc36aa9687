"""The Iceberg destination without a pipeline: changes that a test makes, and what the lake has after them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from headwater.config import DestinationConfig
from headwater.contracts.destination import RunContext
from headwater.contracts.results import (
    PendingResult,
    Result,
    WriteEventsResult,
    WriteTableRowsResult,
)
from headwater.destinations.iceberg.destination import IcebergDestination
from headwater.destinations.iceberg.types import lake_arrow_schema, lake_identifier, spark_schema, to_lake
from headwater.events import (
    DELETE,
    INSERT,
    NO_OLD,
    OLD_KEY,
    UNCHANGED,
    UPDATE,
    ChangeRun,
    EventBatch,
    SourceRead,
    SourceSnapshot,
    Step,
    TableRows,
    Transactions,
    TruncateStep,
)
from headwater.lsn import ZERO, CommitLsn, EndLsn
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import (
    ColumnSchema,
    ReplicatedTableSchema,
    TableId,
    TableName,
    TableSchema,
)
from headwater.schema.types import BUILT_IN
from headwater.store.memory import MemoryStore

_ids = itertools.count(1)
ONE_TRANSACTION = Transactions(
    *(np.ones(1, t) for t in (np.uint64, np.uint64, np.int64, np.uint32, np.int64, np.int64))  # type: ignore[arg-type]
)


def table_schema(
    *columns: tuple[str, int], key: Sequence[str] = ("id",), name: TableName | None = None, **more: Any
) -> ReplicatedTableSchema:
    number = next(_ids)
    made = tuple(
        ColumnSchema(column, BUILT_IN[oid], attnum=i + 1, primary_key=column in key, typmod=more.pop(column, -1))
        for i, (column, oid) in enumerate(columns)
    )
    return ReplicatedTableSchema(TableSchema(TableId(number), name or TableName("public", f"t{number}"), made, **more))


ID_V = (("id", 20), ("v", 25))


@dataclass
class Change:
    op: int
    new: tuple[Any, ...] | None = None
    old: tuple[Any, ...] | None = None
    kind: int = NO_OLD


def insert(*row: Any) -> Change:
    return Change(INSERT, row)


def update(*row: Any, old: tuple[Any, ...] | None = None, kind: int = OLD_KEY) -> Change:
    return Change(UPDATE, row, old, NO_OLD if old is None else kind)


def delete(*row: Any, kind: int = OLD_KEY) -> Change:
    return Change(DELETE, None, row, kind)


def change_run(schema: ReplicatedTableSchema, lsn: int, *changes: Change, first: int = 0) -> ChangeRun:
    types, size = arrow_schema(schema), len(changes)
    none = (None,) * len(types)
    new = [tuple(None if v is UNCHANGED else v for v in (c.new or none)) for c in changes]
    unchanged = {
        name: np.array([c.new is not None and c.new[i] is UNCHANGED for c in changes])
        for i, name in enumerate(types.names)
    }
    return ChangeRun(
        schema,
        np.array([c.op for c in changes], np.uint8),
        np.full(size, lsn, np.uint64),
        np.arange(first, first + size),
        np.zeros(size, np.int64),
        np.arange(size),
        rows_table(types, new),
        np.array([c.kind for c in changes], np.uint8),
        rows_table(types, [c.old or none for c in changes]) if any(c.kind for c in changes) else None,
        {name: flags for name, flags in unchanged.items() if flags.any()},
    )


def rows_table(types: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    columns = [[row[i] for row in rows] for i in range(len(types))]
    return pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, types, strict=True)], schema=types)


def truncate(schema: ReplicatedTableSchema, lsn: int, ordinal: int = 0) -> TruncateStep:
    return TruncateStep(schema, CommitLsn(lsn), ordinal, 0, 0)


def finish(result: Result, call: Callable[[], None]) -> None:
    pending = PendingResult(result)
    call()
    pending.wait()
    for error in pending.table_errors.values():
        raise error


@dataclass
class Lake:
    """The destination under test, and what Spark reads of its tables."""

    spark: SparkSession
    settings: DestinationConfig
    store: MemoryStore = field(default_factory=MemoryStore)
    source: dict[Any, tuple[Any, ...]] = field(default_factory=dict)
    timeline: int = 1

    def __post_init__(self) -> None:
        self.start()

    def start(self, system_identifier: str = "7001", database_oid: int = 5) -> None:
        """A new run, of this cluster and database or of another one."""
        self.destination = IcebergDestination(self.spark, self.store, self.settings)
        self.destination.start(
            RunContext(1, system_identifier, self._read_source, database_oid, "a run", lambda: self.timeline)
        )

    def _read_source(self, schema: ReplicatedTableSchema, keys: pa.Table) -> SourceRead:
        """What `source` has, at the moment of the batch."""
        wanted = [tuple(row.values()) for row in keys.to_pylist()]
        found = rows_table(arrow_schema(schema), [self.source[key] for key in wanted if key in self.source])
        return SourceRead(schema, keys, found, np.zeros(found.num_rows, np.uint32), SourceSnapshot(9, 9), ZERO)

    def copy(
        self,
        schema: ReplicatedTableSchema,
        rows: Sequence[tuple[Any, ...]],
        lsn: int = 100,
        epoch: str = "e1",
        take_over: bool = False,
    ) -> None:
        table = rows_table(arrow_schema(schema), rows)
        lake = lake_arrow_schema(schema)
        frame = self.spark.createDataFrame(to_lake(table, lake), spark_schema(lake))
        result = WriteTableRowsResult()
        rows_of_copy = TableRows(epoch, EndLsn(lsn), lambda: frame, lambda: iter(table.to_batches()), take_over)
        self.store.store_table_schema(schema.table_schema)
        finish(result, lambda: self.destination.write_table_rows(schema, rows_of_copy, result))

    def write(self, *steps: Step) -> None:
        tables: dict[TableId, list[Step]] = {}
        for step in steps:
            tables.setdefault(step.schema.id, []).append(step)
        self.write_tables(tables)

    def write_tables(self, tables: Mapping[TableId, Sequence[Step]]) -> None:
        result = WriteEventsResult()
        finish(result, lambda: self.destination.write_events(EventBatch(tables, ONE_TRANSACTION, EndLsn(1)), result))

    def identifier(self, schema: ReplicatedTableSchema) -> str:
        return lake_identifier(self.settings.catalog.name, schema.name)

    def rows(self, schema: ReplicatedTableSchema) -> list[tuple[Any, ...]]:
        return sorted((tuple(row) for row in self.spark.table(self.identifier(schema)).collect()), key=repr)

    def snapshots(self, schema: ReplicatedTableSchema) -> list[Any]:
        """Without the empty one that a table is made with."""
        found = self.spark.sql(f"SELECT * FROM {self.identifier(schema)}.snapshots ORDER BY committed_at").collect()
        return list(found[1:])
