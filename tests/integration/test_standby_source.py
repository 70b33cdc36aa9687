"""A standby as the source: copied and followed there, while the store is on the primary (Postgres 16 and later)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from headwater.config import PgConnectionConfig
from headwater.errors import PreflightError, StoreError
from headwater.schema.table import TableId
from headwater.source.catalog import load_table_schemas
from headwater.source.rows import read_rows
from headwater.source.session import connect
from headwater.source.slot_errors import SlotInvalidated
from headwater.source.slots import apply_slot_name
from headwater.store.postgres import PostgresStore
from headwater.testing.compare import confirmed_position, flush_position
from headwater.testing.postgres import PostgresServer
from headwater.testing.standby import promote, standby_of, wait_replayed
from tests.background_writes import writing_by
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import RunningIntoMemory, running

SLOT = apply_slot_name(1)
VERSIONS = [pytest.param(16, marks=pytest.mark.versions), 18]


@dataclass(frozen=True, slots=True)
class Pair:
    primary: Database
    standby: Database

    @property
    def store(self) -> PostgresStore:
        return PostgresStore(self.primary.settings, 1)

    @property
    def store_connection(self) -> PgConnectionConfig:
        at = self.primary.settings
        return PgConnectionConfig(
            host=at.host, port=at.port, name=at.database, username=at.username, password=at.password
        )

    def wait_caught_up(self, run: RunningIntoMemory, timeout: float = 60.0) -> None:
        """Until the standby's slot has confirmed what the primary has flushed by now."""
        position = flush_position(self.primary.connection)
        run.wait_for(lambda: confirmed_position(self.standby.connection, SLOT) >= position, timeout)

    def assert_equal(self, run: RunningIntoMemory) -> None:
        wait_replayed(self.primary.server, self.standby.server)
        run.assert_equal("orders", "items")

    @contextmanager
    def running(self, destination: MemoryTables, **settings: Any) -> Iterator[RunningIntoMemory]:
        settings = {"store_pg_connection": self.store_connection, **settings}
        with running(self.standby, destination, self.store, **settings) as run:
            yield run

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The primary logs its running transactions often, as a busy one does every 15 s: slots wait for that."""

        def log(connection: psycopg.Connection[tuple[Any, ...]], turn: int) -> None:
            connection.execute("select pg_log_standby_snapshot()")

        with writing_by(self.primary, log, pace_seconds=0.1):
            yield


@contextmanager
def pair(version: int, **standby_settings: str) -> Iterator[Pair]:
    with PostgresServer.start(version=version) as primary, primary.connect() as above:
        shop = Database(primary, "postgres", above)
        for table in ("orders", "items"):
            shop.execute(f"create table {table}(id int primary key, counter int)")
            shop.execute(f"insert into {table} select i, 0 from generate_series(1, 1000) i")
        shop.execute("create publication shop for table orders, items")
        with standby_of(primary, settings=standby_settings) as standby, standby.connect() as below:
            yield Pair(shop, Database(standby, "postgres", below))


@contextmanager
def writing(shop: Database) -> Iterator[None]:
    def change(connection: psycopg.Connection[tuple[Any, ...]], turn: int) -> None:
        table = ("orders", "items")[turn % 2]
        connection.execute(f"update {table} set counter = counter + 1 where id % 97 = {turn % 97}".encode())
        connection.execute(f"insert into {table} values ({10_000 + turn}, {turn})".encode())
        connection.execute(f"delete from {table} where id = {10_000 + turn - 20}".encode())

    with writing_by(shop, change):
        yield


@pytest.mark.promise("a standby as the source")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_standby_is_copied_followed_and_taken_up_again(version: int) -> None:
    destination = MemoryTables()
    with pair(version) as both:
        with both.busy(), writing(both.primary), both.running(destination) as run:
            run.wait_states("ready", 2)
            seen = len(run.destination.batches)
            run.wait_for(lambda: len(run.destination.batches) > seen + 5)
            run.stop()
        assert both.primary.execute("select slot_name from pg_replication_slots where slot_type = 'logical'") == []
        both.primary.execute("update orders set counter = -1 where id <= 10; delete from items where id <= 10")
        with both.running(destination) as run:
            both.wait_caught_up(run)
            both.assert_equal(run)
            run.stop()
    assert sorted(destination.copies) == ["items", "orders"]


@pytest.mark.invariant(12)
def test_a_read_of_rows_on_a_standby_does_not_claim_to_have_seen_what_still_runs() -> None:
    """A standby's snapshot lists no running transactions."""
    with (
        pair(18) as both,
        both.primary.connect() as open_one,
        connect(both.standby.settings) as session,
        open_one.transaction(),
    ):
        running = int(open_one.execute("select pg_current_xact_id()::text").fetchone()[0])  # type: ignore[index]
        both.primary.execute("update orders set counter = 1 where id = 2")
        wait_replayed(both.primary.server, both.standby.server)
        table = TableId(both.primary.value("select 'orders'::regclass::oid::bigint"))
        schema = load_table_schemas(session, [table], "shop")[table]
        read = read_rows(session, schema, pa.table({"id": pa.array([2], pa.int32())}))
    assert read.rows["counter"].to_pylist() == [1]
    assert read.snapshot.sees(np.array([running, running - 1], np.uint32)).tolist() == [False, True]


@pytest.mark.promise("a standby as the source")
@pytest.mark.invariant(10)
@pytest.mark.parametrize("version", [pytest.param(16, marks=[pytest.mark.versions, pytest.mark.slow]), 18])
def test_a_standby_that_is_promoted_while_it_is_followed_is_followed_further(version: int) -> None:
    destination = MemoryTables()
    with pair(version) as both, PostgresServer.start(version=version) as elsewhere:
        # A store of its own: the primary is lost.
        store = PostgresStore(elsewhere.settings(), 1)
        at = elsewhere.settings()
        connection = PgConnectionConfig(
            host=at.host, port=at.port, name=at.database, username=at.username, password=at.password
        )
        promoted = both.standby
        with both.busy(), running(promoted, destination, store, store_pg_connection=connection) as run:
            run.wait_states("ready", 2)
            both.primary.execute("update orders set counter = 1")
            both.wait_caught_up(run)
            wait_replayed(both.primary.server, promoted.server)
        with running(promoted, destination, store, store_pg_connection=connection) as run:
            both.primary.server.stop("immediate")
            promote(promoted.server)
            promoted.execute("update orders set counter = 2; update items set counter = 2")
            run.wait_caught_up()
            run.assert_equal("orders", "items")
            run.stop()
        lineage = store.get_lineage()
        assert lineage is not None
        assert lineage.timeline == 2
        # Idle positions of the new timeline were confirmed, and some were recorded: the next start takes them as its own.
        with running(promoted, destination, store, store_pg_connection=connection) as run:
            promoted.execute("update orders set counter = 3")
            run.wait_caught_up()
            run.assert_equal("orders", "items")
    assert sorted(destination.copies) == ["items", "orders"]


@pytest.mark.promise("an invalidated slot, with each behaviour")
@pytest.mark.invariant(10)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_slot_that_recovery_invalidated_is_reported_with_what_to_set(version: int) -> None:
    destination = MemoryTables()
    with pair(version, hot_standby_feedback="off", max_standby_streaming_delay="0") as both:
        with both.busy(), both.running(destination) as run:
            run.wait_states("ready", 2)
            run.stop()
        # Rows of the catalog that decoding would need are removed on the primary, and replay removes them on the standby.
        for statement in ("create table doomed(id int)", "drop table doomed", "vacuum pg_class"):
            both.primary.execute(statement)
        both.primary.execute("insert into orders values (5000, 1)")
        wait_replayed(both.primary.server, both.standby.server)
        with pytest.raises(SlotInvalidated) as caught, both.running(destination):
            pass
        assert "hot_standby_feedback" in caught.value.hint


@pytest.mark.promise("a standby as the source")
def test_for_what_a_slot_on_a_standby_waits_is_said_with_the_command_that_helps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said, ready = threading.Event(), threading.Event()
    with pair(18) as both, both.primary.connect() as open_transaction, both.busy():
        # As long as this is open, nothing that the primary logs is enough.
        open_transaction.execute("begin; insert into orders values (5000, 1)")

        def end_it_when_it_was_said() -> None:
            while not ready.wait(0.05):
                if "pg_log_standby_snapshot" in caplog.text:
                    said.set()
                    open_transaction.execute("commit")
                    return

        with caplog.at_level(logging.WARNING):
            helper = threading.Thread(target=end_it_when_it_was_said)
            helper.start()
            try:
                with both.running(MemoryTables()) as run:
                    run.wait_states("ready", 2)
                    both.wait_caught_up(run)
                    both.assert_equal(run)
            finally:
                ready.set()
                helper.join()
    assert said.is_set()


@pytest.mark.promise("a standby as the source")
def test_a_standby_cannot_hold_the_store_nor_a_failover_slot() -> None:
    with pair(18, hot_standby_feedback="off") as both:
        in_standby = PostgresStore(both.standby.settings, 1)
        with pytest.raises(PreflightError) as caught, running(both.standby, store=in_standby):
            pass
        assert "store_pg_connection" in caught.value.hint
        assert "primary may remove catalog rows that the slot on this standby needs" in caught.value.detail
        with (
            pytest.raises(PreflightError, match="not ready") as caught,
            both.running(MemoryTables(), failover_slot=True, heartbeat_interval_ms=1000),
        ):
            pass
        assert "cannot be a failover slot" in caught.value.detail
        assert "no heartbeat is sent" in caught.value.detail
        store = PostgresStore(both.standby.settings, 1)
        with pytest.raises(StoreError, match="in a standby") as refused:
            store.start()
        store.close()
        assert "store_pg_connection" in refused.value.hint


@pytest.mark.promise("a standby as the source")
@pytest.mark.versions
def test_a_standby_before_16_is_refused_with_a_hint() -> None:
    with pair(15) as both:
        with pytest.raises(PreflightError) as caught, both.running(MemoryTables()):
            pass
        assert "that needs 16" in caught.value.detail
        assert "primary" in caught.value.hint
