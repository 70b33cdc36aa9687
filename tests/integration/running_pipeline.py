"""Pipelines in the process of the test, and what to wait for. One into tables in memory needs no Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headwater.config import BatchConfig, PgConnectionConfig, PipelineConfig
from headwater.contracts.destination import Destination
from headwater.contracts.stores import PipelineStore
from headwater.engine.pipeline import Pipeline
from headwater.errors import HeadwaterError
from headwater.source.slots import apply_slot_name, sync_slot_prefix
from headwater.store.memory import MemoryStore
from headwater.testing.compare import confirmed_position, flush_position
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables


def config(database: Database, publication: str = "shop", id: int = 1, **settings: Any) -> PipelineConfig:
    connect = database.settings
    defaults = {
        "pg_connection": PgConnectionConfig(
            host=connect.host,
            port=connect.port,
            name=connect.database,
            username=connect.username,
            password=connect.password,
        ),
        "batch": BatchConfig(max_fill_ms=100),
        "table_error_retry_delay_ms": 100,
    }
    return PipelineConfig(id=id, publication_name=publication, **{**defaults, **settings})


def sync_slot(database: Database, what: object, pipeline_id: int = 1) -> str:
    """The slot that a table's worker has now, by the table's oid; or a group's, by "group"."""
    query = "select slot_name from pg_replication_slots where starts_with(slot_name, %s)"
    return str(database.value(query, [f"{sync_slot_prefix(pipeline_id)}{what}_"]))


class RunningPipeline:
    """A pipeline under test, and what to wait for."""

    patience_seconds = 60.0
    """How long what must come is waited for, unless a call says otherwise."""

    def __init__(self, database: Database, pipeline: Pipeline) -> None:
        self.database = database
        self.pipeline = pipeline

    def wait_states(self, state: str, count: int, timeout: float | None = None) -> None:
        def reached() -> bool:
            return [table.state for table in self.pipeline.progress.snapshot().tables].count(state) == count

        assert self._wait(reached, timeout), self.pipeline.progress.snapshot()

    def states(self) -> dict[str, str]:
        return self.pipeline.progress.snapshot().states()

    def wait_caught_up(self, timeout: float | None = None) -> None:
        position = flush_position(self.database.connection)
        slot = apply_slot_name(self.pipeline.config.id)
        connection = self.database.connection
        assert self._wait(lambda: confirmed_position(connection, slot) >= position, timeout)

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        assert self._wait(condition, timeout), self.pipeline.progress.snapshot()

    def _wait(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        for _ in range(int((self.patience_seconds if timeout is None else timeout) / 0.05)):
            if condition():
                return True
            if self.pipeline.stopped:
                self.pipeline.wait()
                return condition()
            self.pipeline.progress.wait_for(lambda _: condition(), 0.05)
        return condition()

    def stop(self) -> None:
        self.pipeline.shutdown()
        assert self.pipeline.wait(self.patience_seconds)


class RunningIntoMemory(RunningPipeline):
    """A pipeline into tables in memory."""

    def __init__(self, database: Database, pipeline: Pipeline, destination: MemoryTables) -> None:
        super().__init__(database, pipeline)
        self.destination = destination

    def assert_equal(self, *tables: str) -> None:
        for table in tables:
            rows = {row[0]: row for row in self.database.execute(f'select * from "{table}"')}
            assert self.destination.tables[table] == rows


@contextmanager
def started(pipeline: Pipeline) -> Iterator[None]:
    pipeline.start()
    try:
        yield
    finally:
        pipeline.shutdown()
        with suppress(HeadwaterError):  # what the test expects, or has met already
            pipeline.wait(30)


@contextmanager
def running_pipeline(
    database: Database, config: PipelineConfig, store: PipelineStore, destination: Destination, **more: Any
) -> Iterator[RunningPipeline]:
    """Any destination under a pipeline, until the block ends."""
    pipeline = Pipeline(config, store, destination, **more)
    with started(pipeline):
        yield RunningPipeline(database, pipeline)


@contextmanager
def running(
    database: Database,
    destination: MemoryTables | None = None,
    store: PipelineStore | None = None,
    **settings: Any,
) -> Iterator[RunningIntoMemory]:
    destination = destination if destination is not None else MemoryTables()
    store = store if store is not None else MemoryStore()
    pipeline = Pipeline(config(database, **settings), store, destination)
    with started(pipeline):
        yield RunningIntoMemory(database, pipeline, destination)
