"""Many small tables in one Spark job: a job for each costs 80 to 150 ms, one job for many 7 ms a table.

Tasks read whole tables and send them back as Arrow, within a budget of memory, so that the driver may hold them until each
is written. What a table is made of then travels in its write's own task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from headwater.errors import HeadwaterError
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.source.copy_plan import SmallTable
from headwater.spark.map_in_arrow import ArrowFunction, map_in_arrow
from headwater.spark.task_errors import from_text, telling, to_text
from headwater.spark.types import spark_schema

_ANSWER = StructType(
    [StructField("table", LongType()), StructField("rows", BinaryType()), StructField("error", StringType())]
)
_ARROW_ANSWER = pa.schema([("table", pa.int64()), ("rows", pa.binary()), ("error", pa.string())])


@dataclass(frozen=True, slots=True)
class HeldRows:
    """A table's rows in the driver's memory, as an Arrow IPC stream; empty for none."""

    stream: bytes

    def batches(self) -> Iterator[pa.RecordBatch]:
        if self.stream:
            yield from pa.ipc.open_stream(self.stream)

    @property
    def count(self) -> int:
        return sum(batch.num_rows for batch in self.batches())

    def dataframe(self, spark: SparkSession, schema: ReplicatedTableSchema) -> DataFrame:
        """One task that has the rows in it: one file in the lake, and the same types as any other copy."""
        if not self.stream:
            return spark.createDataFrame([], spark_schema(schema))
        return map_in_arrow(spark.range(0, 1, 1, numPartitions=1), _giver(self.stream), spark_schema(schema))


NO_ROWS = HeldRows(b"")

ReadTable = HeldRows | HeadwaterError | None
"""None for a table that did not fit."""


def read_in_one_job(
    spark: SparkSession, tables: Sequence[SmallTable], most_tasks: int, budget_bytes: int
) -> Mapping[TableId, ReadTable]:
    """Read all of them at once, by at most `most_tasks` connections. An error of a table is the answer for that table."""
    tasks = deal([replace(table, origin=table.origin.portable()) for table in tables], most_tasks)
    if not tasks:
        return {}
    read = _reader(tasks, budget_bytes // len(tasks))
    numbers = spark.range(0, len(tasks), 1, numPartitions=len(tasks))
    read_tables: dict[TableId, ReadTable] = {}
    for id, rows, error in map_in_arrow(numbers, telling(read), _ANSWER).collect():
        if error is not None:
            read_tables[TableId(id)] = from_text(error)
        else:
            read_tables[TableId(id)] = None if rows is None else HeldRows(bytes(rows))
    return read_tables


def deal(tables: Sequence[SmallTable], most_tasks: int) -> list[list[SmallTable]]:
    """Tasks of about the same size, the largest tables first."""
    tasks: list[list[SmallTable]] = [[] for _ in range(min(most_tasks, len(tables)))]
    filled = [0] * len(tasks)
    for table in sorted(tables, key=lambda table: -table.estimated_bytes):
        least = filled.index(min(filled))
        tasks[least].append(table)
        # A table costs something even when it is nearly empty.
        filled[least] += table.estimated_bytes + (1 << 16)
    return tasks


def _reader(tasks: Sequence[Sequence[SmallTable]], budget_bytes: int) -> ArrowFunction:
    def read_small(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Imported where rows are read and nowhere before: it brings numba, which takes a second.
        from headwater.source.copy_small import read_small_tables

        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for read in read_small_tables(tasks[number], budget_bytes):
                    rows = read.rows.to_pybytes() if read.rows is not None else None
                    error = to_text(read.error) if read.error is not None else None
                    yield pa.RecordBatch.from_pylist(
                        [{"table": read.id, "rows": rows, "error": error}], schema=_ARROW_ANSWER
                    )

    return read_small


def _giver(stream: bytes) -> ArrowFunction:
    def give(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in numbers:
            yield from pa.ipc.open_stream(stream)

    return give
