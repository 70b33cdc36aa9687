"""What every benchmark stands on: one server, one warm Spark session, one lake, and how a figure is shown."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from headwater.config import BatchConfig, DestinationConfig, PgConnectionConfig, PipelineConfig, SparkConfig
from headwater.destinations.iceberg.destination import IcebergDestination
from headwater.destinations.iceberg.warehouse import spark_catalog
from headwater.engine.pipeline import Pipeline
from headwater.observability.progress import Progress
from headwater.spark.jars import Coordinate, fetch, jar_settings
from headwater.spark.session import build_session
from headwater.store.postgres import PostgresStore
from headwater.testing.postgres import PostgresServer

POSTGRES_JDBC = Coordinate("org.postgresql", "postgresql", "42.7.8")
HEAP_BYTES = 3 << 30
COLUMNS = (
    "id bigint primary key, customer int, amount numeric(12,2), paid boolean,"
    " at timestamptz, note text, city text, score float8"
)
ROW = (
    "i, (i % 50000)::int, (i * 0.37)::numeric(12,2), i % 2 = 0, timestamptz '2026-01-01' + i * interval '1 second',"
    " 'note number ' || i, 'city ' || i % 1000, i / 3.0"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report."""

    what: str
    value: str
    ratio: str = ""
    mark: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Setting:
    server: PostgresServer
    spark: SparkSession
    warehouse: Path

    @property
    def jvm(self) -> int:
        """The process id of Spark's JVM."""
        return int(self.spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]

    def database(self) -> str:
        return self.server.create_database()

    def pipeline(
        self, database: str, id: int, publication: str = "bench", batch: BatchConfig | None = None
    ) -> Pipeline:
        connect = self.server.settings(database)
        connection = PgConnectionConfig(
            host=connect.host,
            port=connect.port,
            name=database,
            username=connect.username,
            password=connect.password,
        )
        config = PipelineConfig(
            id=id, publication_name=publication, pg_connection=connection, batch=batch or BatchConfig()
        )
        store = PostgresStore(connection.connect_settings("headwater store"), id)
        destination = IcebergDestination(self.spark, store, lake_settings(self.warehouse))
        return Pipeline(config, store, destination, spark=self.spark, progress=Progress())

    @contextmanager
    def running(self, database: str, id: int, batch: BatchConfig | None = None) -> Iterator[Pipeline]:
        pipeline = self.pipeline(database, id, batch=batch)
        pipeline.start()
        try:
            yield pipeline
        finally:
            pipeline.shutdown()
            pipeline.wait()


def wait_ready(pipeline: Pipeline, tables: int) -> None:
    def ready() -> bool:
        states = pipeline.progress.snapshot().states()
        if "errored" in states.values():
            raise RuntimeError(f"a table cannot be copied: {pipeline.progress.snapshot()}")
        return len(states) == tables and set(states.values()) == {"ready"}

    while not pipeline.progress.wait_for(lambda _: ready(), 1.0):
        if pipeline.stopped:
            pipeline.wait()


def wait_confirmed(pipeline: Pipeline, position: int) -> None:
    while not pipeline.progress.wait_for(lambda now: now.confirmed >= position, 1.0):
        if pipeline.stopped:
            pipeline.wait()


def lake_settings(warehouse: Path) -> DestinationConfig:
    return DestinationConfig(warehouse=str(warehouse))


@contextmanager
def setting() -> Iterator[Setting]:
    directory = Path(tempfile.mkdtemp(prefix="headwater-bench-"))
    try:
        warehouse = directory / "lake"
        warehouse.mkdir()
        jdbc = ",".join(str(path) for path in fetch((POSTGRES_JDBC,)).glob("*.jar"))
        settings = SparkConfig(
            conf={"spark.jars": f"{jar_settings()['spark.jars']},{jdbc}"}, driver_memory=f"{HEAP_BYTES >> 30}g"
        )
        spark = build_session(settings, spark_catalog(lake_settings(warehouse)))
        # As a production server would: a WAL of several GB between checkpoints, and nothing switched off that costs reading.
        with PostgresServer.start(settings={"max_wal_size": "8GB", "shared_buffers": "512MB"}) as server:
            yield Setting(server, spark, warehouse)
        spark.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Clock:
    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start
