"""A mirror in memory, and pipelines into it: the engine by itself, without Spark, in tenths of a second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from headwater.config import BatchConfig, PgConnectionConfig, PipelineConfig
from headwater.contracts.destination import Destination, RunContext
from headwater.contracts.results import DropTableForCopyResult, WriteEventsResult, WriteTableRowsResult
from headwater.contracts.stores import PipelineStore
from headwater.engine.pipeline import Pipeline
from headwater.errors import HeadwaterError
from headwater.events import UNCHANGED, Delete, EventBatch, Insert, TableRow, TableRows, Truncate, Update
from headwater.lsn import EndLsn
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.source.slots import apply_slot_name, sync_slot_prefix
from headwater.store.memory import MemoryStore
from headwater.testing.compare import confirmed_position, flush_position
from tests.conftest import Database


class MirrorDestination(Destination):
    """Rows by key. Skips what its watermark covers, as any destination must that wants its effect once."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[Any, TableRow]] = {}
        self.watermarks: dict[str, tuple[int, int]] = {}
        self.copies: list[str] = []
        self._names: dict[TableId, str] = {}
        self.batches: list[EventBatch] = []
        self.shutdowns = 0
        self.before_copy: Callable[[TableRows], None] = lambda rows: None
        self.during_copy: Callable[[TableRows], None] = lambda rows: None
        self.after_copy: Callable[[TableRows], None] = lambda rows: None
        self.before_events: Callable[[EventBatch], None] = lambda batch: None
        self._lock = threading.Lock()

    @classmethod
    def name(cls) -> str:
        return "mirror"

    def start(self, context: RunContext) -> None:
        self.context = context

    def shutdown(self) -> None:
        self.shutdowns += 1

    def furthest_position(self, table_ids: Sequence[TableId]) -> EndLsn | None:
        with self._lock:
            marks = [self.watermarks[self._names[table]] for table in table_ids if table in self._names]
            return max((EndLsn(lsn + (ordinal >= 0)) for lsn, ordinal in marks), default=None)

    def drop_table_for_copy(
        self, replicated_table_schema: ReplicatedTableSchema, result: DropTableForCopyResult
    ) -> None:
        result.done()

    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        self.before_copy(table_rows)
        name = replicated_table_schema.name.name
        key = _key(replicated_table_schema)
        rows: dict[Any, TableRow] = {}
        for number, row in enumerate(table_rows.rows()):
            if number == 0:
                self.during_copy(table_rows)
            assert row[key] not in rows, "a row was copied twice"
            rows[row[key]] = row
        with self._lock:
            self.tables[name] = rows
            self.watermarks[name] = (table_rows.start_lsn.value, -1)
            self.copies.append(name)
            self._names[replicated_table_schema.id] = name
        self.after_copy(table_rows)
        result.done()

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        self.before_events(events)
        with self._lock:
            self.batches.append(events)
            for event in events.events():
                if isinstance(event, (Insert, Update, Delete, Truncate)):
                    self._apply(event)
        result.done()

    def _apply(self, event: Insert | Update | Delete | Truncate) -> None:
        name, key = event.schema.name.name, _key(event.schema)
        at = (event.commit_lsn.value, event.ordinal)
        if at <= self.watermarks[name]:
            return
        self.watermarks[name] = at
        rows = self.tables[name]
        if isinstance(event, Truncate):
            rows.clear()
        elif isinstance(event, Delete):
            rows.pop(event.old[key], None)
        else:
            before = rows.get(event.new[key])
            if isinstance(event, Update) and event.old is not None:
                before = rows.pop(event.old[key], before)
            values = zip(event.new, before or event.new, strict=True)
            rows[event.new[key]] = tuple(old if new is UNCHANGED else new for new, old in values)


def _key(schema: ReplicatedTableSchema) -> int:
    return [column.name for column in schema.columns].index(schema.key[0])


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


class Watched:
    """A pipeline under test, and what to wait for."""

    def __init__(self, database: Database, pipeline: Pipeline) -> None:
        self.database = database
        self.pipeline = pipeline

    def wait_states(self, state: str, count: int, timeout: float = 60.0) -> None:
        def reached() -> bool:
            return [table.state for table in self.pipeline.progress.snapshot().tables].count(state) == count

        assert self._wait(reached, timeout), self.pipeline.progress.snapshot()

    def states(self) -> dict[str, str]:
        return self.pipeline.progress.snapshot().states()

    def wait_caught_up(self, timeout: float = 60.0) -> None:
        position = flush_position(self.database.connection)
        slot = apply_slot_name(self.pipeline.config.id)
        connection = self.database.connection
        assert self._wait(lambda: confirmed_position(connection, slot) >= position, timeout)

    def wait_for(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        assert self._wait(condition, timeout), self.pipeline.progress.snapshot()

    def _wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        for _ in range(int(timeout / 0.05)):
            if condition():
                return True
            if self.pipeline.stopped:
                self.pipeline.wait()
                return condition()
            self.pipeline.progress.wait_for(lambda _: condition(), 0.05)
        return condition()

    def stop(self) -> None:
        self.pipeline.shutdown()
        assert self.pipeline.wait(30)


class Running(Watched):
    """A pipeline into a mirror in memory."""

    def __init__(self, database: Database, pipeline: Pipeline, mirror: MirrorDestination) -> None:
        super().__init__(database, pipeline)
        self.mirror = mirror

    def assert_equal(self, *tables: str) -> None:
        for table in tables:
            rows = {row[0]: row for row in self.database.execute(f'select * from "{table}"')}
            assert self.mirror.tables[table] == rows


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
def watched(
    database: Database, config: PipelineConfig, store: PipelineStore, destination: Destination, **more: Any
) -> Iterator[Watched]:
    """Any destination under a pipeline, until the block ends."""
    pipeline = Pipeline(config, store, destination, **more)
    with started(pipeline):
        yield Watched(database, pipeline)


@contextmanager
def running(
    database: Database,
    mirror: MirrorDestination | None = None,
    store: PipelineStore | None = None,
    **settings: Any,
) -> Iterator[Running]:
    mirror = mirror if mirror is not None else MirrorDestination()
    store = store if store is not None else MemoryStore()
    pipeline = Pipeline(config(database, **settings), store, mirror)
    with started(pipeline):
        yield Running(database, pipeline, mirror)
