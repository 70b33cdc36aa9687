"""A table copy as a Spark DataFrame: every task reads its ranges with COPY binary at the exported snapshot.

Two interfaces to one reader: `copy_dataframe` for the engine, the data source `postgres_copy` for users. Neither puts a
password into anything that Spark shows (invariant 16): settings travel inside pickled functions only, never as options or
configuration (docs/decisions/0002-credentials-on-executors.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
from pyspark import Accumulator
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headwater.errors import ConfigError
from headwater.schema.table import ReplicatedTableSchema
from headwater.source.copy_origin import CopyOrigin
from headwater.source.copy_plan import CopyPlan, CopyRange
from headwater.source.exported_snapshot import ExportedSnapshot
from headwater.spark.map_in_arrow import ArrowFunction, map_in_arrow
from headwater.spark.task_errors import telling
from headwater.spark.types import spark_columns, spark_schema
from headwater.wire.settings import ConnectSettings

_LOCAL_MASTER = re.compile(r"local(?:\[\s*(\*|\d+)\s*(?:,\s*\d+\s*)?\])?")


def copy_dataframe(
    spark: SparkSession,
    settings: ConnectSettings,
    snapshot_name: str,
    plan: CopyPlan,
    schema: ReplicatedTableSchema,
    max_connections: int,
    rows_read: Accumulator[int] | None = None,
) -> DataFrame:
    """The table at the snapshot. Reads when it is used, and again each time: the snapshot must live until then.

    At most `max_connections` ranges are read at once (see `task_limit`). `rows_read` counts as tasks end, for the display of
    progress.
    """
    tasks = plan.tasks(task_limit(spark.conf.get("spark.master", "") or "", max_connections))
    if not tasks:  # a partitioned table without a leaf
        return spark.createDataFrame([], spark_schema(schema))
    origin = CopyOrigin(settings, snapshot_name, plan.server_started_at, schema.columns).portable()
    read = telling(_task_reader(origin, tasks, rows_read))
    return map_in_arrow(spark.range(0, len(tasks), 1, numPartitions=len(tasks)), read, spark_schema(schema))


def task_limit(master: str, max_connections: int) -> int | None:
    """How many tasks a copy may have so that no more than `max_connections` of them run at once; None for any number.

    Spark has no limit on a job's running tasks. Where the master has no more cores than connections are allowed, the
    cores are the limit, and tasks stay as small as the ranges, so that other jobs get their turn. Where it has more, or may
    grow, the ranges are distributed over as many tasks as there may be connections: long ones, but other cores stay free.
    """
    cores = _local_cores(master)
    if cores is None:
        return max_connections
    return None if cores <= max_connections else max_connections


def task_slots(spark: SparkSession | None) -> int | None:
    """How many tasks Spark runs at once, where that is a fixed number: on one machine. A cluster's may grow."""
    return None if spark is None else _local_cores(spark.conf.get("spark.master", "") or "")


def _local_cores(master: str) -> int | None:
    found = _LOCAL_MASTER.fullmatch(master)
    if found is None:
        return None
    return (os.cpu_count() or 1) if found[1] == "*" else int(found[1] or 1)


def _task_reader(
    origin: CopyOrigin, tasks: Sequence[Sequence[CopyRange]], rows_read: Accumulator[int] | None
) -> ArrowFunction:
    def read_copy_ranges(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for rows in _read(origin, tasks[number]):
                    if rows_read is not None:
                        rows_read.add(rows.num_rows)
                    yield rows

    return read_copy_ranges


def _read(origin: CopyOrigin, ranges: Sequence[CopyRange]) -> Iterator[pa.RecordBatch]:
    # Imported where rows are read and nowhere before: numba takes 1 to 1.5 s, once in a Python worker that decodes, and
    # Spark's planning processes, which unpickle this module too, never decode.
    from headwater.source.copy_read import read_ranges

    return read_ranges(origin, ranges)


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """One table of one exported snapshot, ready to be read."""

    origin: CopyOrigin
    tasks: tuple[tuple[CopyRange, ...], ...]


class PostgresCopy(DataSource):
    """`spark.read.format("postgres_copy").option("exported_snapshot", ...).option("table", ...)`.

    Spark makes this object in processes of its own, which see nothing of the driver's memory but the options and the
    class. So the class itself, made by `register_copy_source` and pickled by value, carries what must not be an option.
    """

    copies: ClassVar[Mapping[tuple[str, str], PlannedCopy]] = {}

    @classmethod
    def name(cls) -> str:
        return "postgres_copy"

    def schema(self) -> StructType:
        return spark_columns(self._planned().origin.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        return CopyReader(self._planned())

    def _planned(self) -> PlannedCopy:
        wanted = (self.options.get("exported_snapshot", ""), self.options.get("table", ""))
        planned = self.copies.get(wanted)
        if planned is None:
            known = ", ".join(f"{table} at {snapshot}" for snapshot, table in self.copies) or "none"
            raise ConfigError(
                f"postgres_copy has no table {wanted[1]!r} at an exported snapshot {wanted[0]!r}",
                detail=f"Registered are: {known}.",
                hint="Register with register_copy_source(spark, snapshot) and pass **snapshot.options(table).",
            )
        return planned


class CopyRanges(InputPartition):
    """What one task reads."""

    def __init__(self, ranges: tuple[CopyRange, ...]) -> None:
        super().__init__(None)
        self.ranges = ranges


class CopyReader(DataSourceReader):
    """Made twice by Spark, and pickled: holds values only."""

    def __init__(self, planned: PlannedCopy) -> None:
        self._planned = planned

    def partitions(self) -> Sequence[InputPartition]:
        return [CopyRanges(task) for task in self._planned.tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, CopyRanges)
        return _read(self._planned.origin, partition.ranges)


def register_copy_source(spark: SparkSession, *snapshots: ExportedSnapshot, max_connections: int = 4) -> None:
    """Make the tables of these exported snapshots readable as `postgres_copy`, instead of those registered before."""
    limit = task_limit(spark.conf.get("spark.master", "") or "", max_connections)
    copies = {
        (snapshot.snapshot_name, name): PlannedCopy(snapshot.origin(name).portable(), table.plan.tasks(limit))
        for snapshot in snapshots
        for name, table in snapshot.tables.items()
    }
    # A class of its own: as no attribute of any module it is pickled whole, by value, and the copies with it.
    spark.dataSource.register(type("HeldPostgresCopy", (PostgresCopy,), {"copies": copies}))
