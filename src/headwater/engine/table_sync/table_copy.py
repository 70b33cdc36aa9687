"""One table's copy: where its rows come from, and a tag on its Spark jobs, to follow them and to cancel them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from headwater.errors import ConfigError
from headwater.events import TableRows
from headwater.lsn import EndLsn
from headwater.observability.progress import Progress
from headwater.schema.table import ReplicatedTableSchema
from headwater.source.copy_origin import CopyOrigin
from headwater.source.copy_plan import CopyPlan, SmallTable
from headwater.source.copy_read import copy_batches
from headwater.source.publication import PublishedTable
from headwater.spark.copy_source import copy_dataframe
from headwater.spark.session import SCHEDULING_POOL
from headwater.spark.small_tables import HeldRows
from headwater.wire.settings import ConnectSettings

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import DataFrame, SparkSession


class TableCopy:
    def __init__(
        self,
        pipeline_id: int,
        spark: SparkSession | None,
        progress: Progress,
        table: PublishedTable,
        schema: ReplicatedTableSchema,
        plan: CopyPlan,
        settings: ConnectSettings,
        exported_snapshot: str,
        connections: int,
    ) -> None:
        self.schema = schema
        self.plan = plan
        self.held: HeldRows | None = None
        """The rows, where they were read together with others'."""
        self._spark = spark
        self._progress = progress
        self._table = table
        self._settings = settings
        self._exported_snapshot = exported_snapshot
        self._connections = connections
        self._tag = f"headwater-copy-{pipeline_id}-{table.id}"
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._rows: Accumulator[int] | None = None
        self._estimate = max(table.estimated_rows or 0, 0)
        progress.copy_started(table.id, self._estimate, plan.estimated_bytes)

    def rows(self, start: EndLsn, *, take_over: bool) -> TableRows:
        """For the destination, as a copy with a name of its own."""
        return TableRows(uuid.uuid4().hex, start, self._dataframe, self._batches, take_over=take_over)

    def as_small(self) -> SmallTable:
        origin = CopyOrigin(self._settings, self._exported_snapshot, self.plan.server_started_at, self.schema.columns)
        return SmallTable(self._table.id, origin, self.plan.ranges)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        if self.held is not None:
            return self.held.batches()
        return copy_batches(self._settings, self._exported_snapshot, self.plan, self.schema)

    def _dataframe(self) -> DataFrame:
        spark = self._spark
        if spark is None:
            raise ConfigError(
                "this destination reads the copy through Spark, but the pipeline has no session",
                hint="Pass spark=... to Pipeline, or read TableRows.batches() instead.",
            )
        if self.held is not None:
            return self.held.dataframe(spark, self.schema)
        with self._lock:
            self._rows = spark.sparkContext.accumulator(0)
        return copy_dataframe(
            spark, self._settings, self._exported_snapshot, self.plan, self.schema, self._connections, self._rows
        )

    def in_job_group(self, work: Callable[[], None]) -> None:
        tagged(self._spark, self._tag, work)

    def cancel(self) -> None:
        cancel_tagged(self._spark, self._tag)

    def report(self) -> None:
        if self._rows is not None and self._estimate:
            self._progress.copy_advanced(self._table.id, self._rows.value / self._estimate)

    def finished(self) -> None:
        if self.held is not None:
            rows, self.held = self.held.count, None
        else:
            rows = self._rows.value if self._rows is not None else self._estimate
        self._progress.copy_finished(self._table.id, rows, time.monotonic() - self._started)


def tagged(spark: SparkSession | None, tag: str, work: Callable[[], None]) -> None:
    """Do the work with its Spark jobs tagged, and in a scheduling pool of their own: pools share the cores fairly, so changes of
    other tables and other copies get their turn, and within a pool jobs wait for each other."""
    if spark is None:
        work()
        return
    context = spark.sparkContext
    context.addJobTag(tag)
    context.setLocalProperty(SCHEDULING_POOL, tag)
    try:
        work()
    finally:
        context.setLocalProperty(SCHEDULING_POOL, None)  # type: ignore[arg-type]
        context.removeJobTag(tag)


def cancel_tagged(spark: SparkSession | None, tag: str) -> None:
    if spark is not None:
        spark.sparkContext.cancelJobsWithTag(tag)
