"""One table's copy as Spark sees it: a tag on its jobs, to follow them and to cancel them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headwater.engine.run import Run
from headwater.errors import ConfigError
from headwater.schema.table import ReplicatedTableSchema
from headwater.source.copy_plan import CopyPlan
from headwater.source.publication import PublishedTable
from headwater.spark.copy_source import copy_dataframe
from headwater.wire.settings import ConnectSettings

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import DataFrame


class CopyProgress:
    def __init__(self, run: Run, table: PublishedTable, plan: CopyPlan) -> None:
        self._run = run
        self._table = table
        self._plan = plan
        self._tag = f"headwater-copy-{run.config.id}-{table.id}"
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._rows: Accumulator[int] | None = None
        self._estimate = max(table.estimated_rows or 0, 0)
        run.progress.copy_started(table.id, self._estimate, plan.estimated_bytes)

    def dataframe(self, settings: ConnectSettings, exported_snapshot: str, schema: ReplicatedTableSchema) -> DataFrame:
        spark = self._run.spark
        if spark is None:
            raise ConfigError(
                "this destination reads the copy through Spark, but the pipeline has no session",
                hint="Pass spark=... to Pipeline, or read TableRows.batches() instead.",
            )
        with self._lock:
            self._rows = spark.sparkContext.accumulator(0)
        connections = self._run.config.max_copy_connections_per_table
        return copy_dataframe(spark, settings, exported_snapshot, self._plan, schema, connections, self._rows)

    def in_job_group(self, work: Callable[[], None]) -> None:
        """Do the work with its Spark jobs tagged, and in the copies' scheduling pool, so that changes get their turn."""
        if self._run.spark is None:
            work()
            return
        context = self._run.spark.sparkContext
        context.addJobTag(self._tag)
        context.setLocalProperty("spark.scheduler.pool", "copy")
        try:
            work()
        finally:
            context.removeJobTag(self._tag)

    def cancel(self) -> None:
        if self._run.spark is not None:
            self._run.spark.sparkContext.cancelJobsWithTag(self._tag)

    def report(self) -> None:
        if self._rows is not None and self._estimate:
            self._run.progress.copy_advanced(self._table.id, self._rows.value / self._estimate)

    def finished(self) -> None:
        rows = self._rows.value if self._rows is not None else self._estimate
        self._run.progress.copy_finished(self._table.id, rows, time.monotonic() - self._started)
