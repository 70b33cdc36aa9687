"""Whole pipelines into a real lake, in the test's own process: one Spark for all, a warehouse a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from headwater.config import CatalogConfig, DestinationConfig
from headwater.contracts.stores import PipelineStore
from headwater.destinations.iceberg.destination import IcebergDestination
from headwater.destinations.iceberg.warehouse import prepare_warehouse, spark_catalog
from headwater.engine.pipeline import Pipeline
from headwater.schema.table import TableName
from headwater.store.memory import MemoryStore
from headwater.testing.compare import compare_table
from headwater.testing.lake_rows import open_lake
from tests.conftest import Database
from tests.integration.running_pipeline import RunningPipeline, config, started

EXTENSIONS = "spark.sql.extensions"


class RunningIntoLake(RunningPipeline):
    """A pipeline into Iceberg tables, compared by an engine that did not write them."""

    patience_seconds = 240.0
    """On a busy machine Spark takes tens of seconds for a first job."""

    def __init__(self, database: Database, pipeline: Pipeline, warehouse: Path, session: SparkSession) -> None:
        super().__init__(database, pipeline)
        self.warehouse = warehouse
        self.session = session

    def wait_ready(self, count: int) -> None:
        self.wait_states("ready", count)

    def assert_equal(self, *tables: TableName | str) -> None:
        lake = open_lake(self.warehouse)
        for table in tables:
            compare_table(self.database.connection, _name(table), lake).assert_equal()

    def snapshots(self, table: TableName | str) -> int:
        """How many lake commits led to what the table has: those that were staged and never published do not count."""
        name = _name(table)
        loaded = open_lake(self.warehouse).load_table((name.namespace, name.name))
        count, snapshot = 0, loaded.current_snapshot()
        while snapshot is not None:
            count += 1
            snapshot = loaded.snapshot_by_id(snapshot.parent_snapshot_id) if snapshot.parent_snapshot_id else None
        return count


def _name(table: TableName | str) -> TableName:
    return table if isinstance(table, TableName) else TableName("public", table)


@contextmanager
def running_into_lake(
    database: Database,
    spark: SparkSession,
    directory: Path,
    store: PipelineStore | None = None,
    destination: type[IcebergDestination] = IcebergDestination,
    catalog: CatalogConfig | None = None,
    **settings: Any,
) -> Iterator[RunningIntoLake]:
    lake = DestinationConfig(warehouse=str(directory / "lake"), catalog=catalog or CatalogConfig())
    prepare_warehouse(lake)
    # A session has catalogs of its own, so every test may have its own lake under the same name.
    session = spark.newSession()
    for key, value in spark_catalog(lake).items():
        if key != EXTENSIONS:
            session.conf.set(key, value)
    store = store if store is not None else MemoryStore()
    pipeline = Pipeline(config(database, **settings), store, destination(session, store, lake), spark=session)
    with started(pipeline):
        yield RunningIntoLake(database, pipeline, directory / "lake", session)
