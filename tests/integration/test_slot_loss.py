"""Slots that cannot be used any more, each kind with its error and with each behaviour, in a whole pipeline (invariant 10)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from headwater.config.pipeline import InvalidatedSlotBehavior
from headwater.contracts.results import WriteTableRowsResult
from headwater.contracts.stores import APPLY, WorkerType
from headwater.events import TableRows
from headwater.lsn import EndLsn
from headwater.schema.table import ReplicatedTableSchema
from headwater.source.preflight import check_source
from headwater.source.slot_errors import OtherServer, SlotInvalidated, SlotMissing
from headwater.source.slots import apply_slot_name
from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from headwater.testing.postgres import PostgresServer
from headwater.wire.connection import WireConnection
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import running, sync_slot

pytestmark = pytest.mark.invariant(10)

SLOT = apply_slot_name(1)
RECREATE = InvalidatedSlotBehavior.RECREATE
LITTLE_WAL = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "min_wal_size": "32MB"}


@contextmanager
def shop_on(**settings: str) -> Iterator[Database]:
    with PostgresServer.start(settings=settings) as server, server.connect() as connection:
        shop = Database(server, "postgres", connection)
        make_shop(shop)
        yield shop


def make_shop(shop: Database) -> None:
    shop.execute("create table orders(id int primary key, counter int)")
    shop.execute("insert into orders select i, 0 from generate_series(1, 100) i")
    shop.execute("create publication shop for table orders")


@pytest.fixture
def shop(database: Database) -> Database:
    make_shop(database)
    return database


def remove_wal(shop: Database) -> None:
    """More than the server keeps for a slot; what the slot needs is gone then."""
    for _ in range(4):
        shop.execute("update orders set counter = counter + 1")
        shop.execute("select pg_switch_wal()")
    shop.execute("checkpoint")
    assert shop.value("select wal_status from pg_replication_slots where slot_name = %s", [SLOT]) == "lost"


@pytest.mark.promise("an invalidated slot, with each behaviour")
def test_a_slot_whose_wal_was_removed_is_an_error_and_with_recreate_a_new_copy() -> None:
    destination = MemoryTables()
    with shop_on(**LITTLE_WAL) as shop:
        store = PostgresStore(shop.settings, 1)
        with running(shop, destination, store) as run:
            run.wait_states("ready", 1)
            run.stop()
        remove_wal(shop)
        with pytest.raises(SlotInvalidated, match="can no longer serve") as caught, running(shop, destination, store):
            pass
        assert "wal_status=lost" in caught.value.detail
        assert "Raise max_slot_wal_keep_size" in caught.value.hint
        with running(shop, destination, store, invalidated_slot_behavior=RECREATE) as run:
            run.wait_states("ready", 1)
            shop.execute("update orders set counter = counter + 1")
            run.wait_caught_up()
            run.assert_equal("orders")
            run.stop()
        # The new slot is an ordinary one: nothing is copied a third time.
        with running(shop, destination, store) as run:
            shop.execute("update orders set counter = counter + 1")
            run.wait_caught_up()
            run.assert_equal("orders")
    assert destination.copies == ["orders", "orders"]


@pytest.mark.promise("a missing slot")
def test_a_slot_that_is_dropped_under_a_running_pipeline_is_reported_as_missing(shop: Database) -> None:
    with running(shop) as run:
        run.wait_states("ready", 1)
        drop_under_its_reader(shop)
        with pytest.raises(SlotMissing, match="does not exist") as caught:
            run.pipeline.wait(60)
        assert "headwater resync" in caught.value.hint


@pytest.mark.security
def test_a_slot_that_is_opened_again_is_opened_beside_the_supervising_thread(
    shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not answer then must not keep that thread from noticing a stop."""
    asked: list[str] = []

    def recorded(*arguments: Any, **options: Any) -> Any:
        asked.append(threading.current_thread().name)
        return check_source(*arguments, **options)

    monkeypatch.setattr("headwater.engine.pipeline.check_source", recorded)
    with running(shop, invalidated_slot_behavior=RECREATE) as run:
        run.wait_states("ready", 1)
        asked.clear()
        drop_under_its_reader(shop)
        run.wait_for(lambda: bool(asked))
        run.wait_for(lambda: run.destination.copies == ["orders", "orders"])
        run.wait_states("ready", 1)
        shop.execute("update orders set counter = counter + 1")
        run.wait_caught_up()
        run.assert_equal("orders")
    assert set(asked) == {"headwater-open"}


def drop_under_its_reader(shop: Database) -> None:
    """In one statement, until it wins against the reader's next attempt."""
    while shop.value("select count(*) from pg_replication_slots where slot_name = %s", [SLOT]):
        shop.execute(
            "select pg_terminate_backend(active_pid, 5000) from pg_replication_slots where slot_name = %s", [SLOT]
        )
        shop.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s and not active",
            [SLOT],
        )


@pytest.mark.promise(
    "missing, invalidated, in use, another cluster, a new timeline, progress ahead: told apart, each with its hint"
)
@pytest.mark.promise("stale progress ahead of a new slot is ignored")
def test_another_cluster_is_an_error_and_its_lower_positions_count_after_recreate(shop: Database) -> None:
    destination, store = MemoryTables(), MemoryStore()
    with shop_on() as far_ahead:
        for _ in range(20):
            far_ahead.execute("update orders set counter = counter + 1; select pg_switch_wal()")
        with running(far_ahead, destination, store) as run:
            run.wait_states("ready", 1)
            far_ahead.execute("update orders set counter = counter + 1")
            run.wait_caught_up()
            run.stop()
    stale = store.get_replication_progress(APPLY)
    assert stale is not None
    with shop_on() as other:
        assert EndLsn.parse(other.value("select pg_current_wal_flush_lsn()::text")) < stale
        with pytest.raises(OtherServer, match="another server") as caught, running(other, destination, store):
            pass
        assert "system identifier" in caught.value.detail
        # Progress of the old lineage must not hold back the new one: neither the apply worker's nor a table's.
        (table,) = store.get_table_states()
        store.upsert_replication_progress(WorkerType(table), stale)
        with running(other, destination, store, invalidated_slot_behavior=RECREATE) as run:
            run.wait_states("ready", 1)
            other.execute("update orders set counter = counter + 1")
            run.wait_caught_up()
            run.assert_equal("orders")
            run.stop()
        progress = store.get_replication_progress(APPLY)
        assert progress is not None
        assert progress < stale
    assert destination.copies == ["orders", "orders"]


@pytest.mark.promise("names that the server does not cut, and one for each worker")
def test_every_worker_has_a_name_of_its_own_that_the_server_does_not_cut(shop: Database) -> None:
    longest, begun, release = 2**31 - 1, threading.Event(), threading.Event()
    destination = MemoryTables()

    def block(rows: TableRows) -> None:
        begun.set()
        assert release.wait(60)

    destination.before_copy = block
    table = shop.value("select 'orders'::regclass::oid::bigint")
    with running(shop, destination, id=longest, heartbeat_interval_ms=100) as run:
        assert begun.wait(60)
        apply, sync = apply_slot_name(longest), sync_slot(shop, table, longest)
        workers = {apply, sync, f"headwater_lock_{longest}", f"headwater_heartbeat_{longest}"}
        run.wait_for(lambda: workers <= {name for (name,) in shop.execute(NAMES, [shop.name])})
        slots = {name for (name,) in shop.execute("select slot_name from pg_replication_slots")}
        assert {apply, sync} <= slots
        release.set()
        run.wait_states("ready", 1)


NAMES = "select application_name from pg_stat_activity where datname = %s"


@pytest.mark.promise(
    "missing, invalidated, in use, another cluster, a new timeline, progress ahead: told apart, each with its hint"
)
def test_a_slot_that_another_session_still_reads_is_waited_for(shop: Database) -> None:
    destination, store = MemoryTables(), MemoryStore()
    with running(shop, destination, store) as run:
        run.wait_states("ready", 1)
        run.stop()
    left = WireConnection.connect(replace(shop.settings, application_name="somebody"), replication=True)
    left.start_replication(SLOT, EndLsn(0), {"proto_version": "1", "publication_names": "shop"})
    looked = threading.Event()

    def leave_when_it_was_looked_at() -> None:
        with shop.connect() as connection:
            while not looked.wait(0.02):
                if connection.execute(LOOKED, [shop.name]).fetchone() == (True,):
                    looked.set()
        left.close()

    leaving = threading.Thread(target=leave_when_it_was_looked_at)
    leaving.start()
    try:
        with running(shop, destination, store) as run:
            assert looked.is_set()
            shop.execute("update orders set counter = 5")
            run.wait_caught_up()
            run.assert_equal("orders")
    finally:
        looked.set()
        leaving.join()
    assert destination.copies == ["orders"]


LOOKED = """
select exists (select from pg_stat_activity where datname = %s and application_name = 'headwater_1'
               and query like '%%pg_terminate_backend%%')
"""


@pytest.mark.promise("a missing slot")
def test_a_slot_lost_under_a_running_pipeline_leads_to_a_new_copy_where_that_was_chosen(shop: Database) -> None:
    with running(shop, invalidated_slot_behavior=RECREATE) as run:
        run.wait_states("ready", 1)
        drop_under_its_reader(shop)
        run.wait_for(lambda: run.destination.copies == ["orders", "orders"])
        run.wait_states("ready", 1)
        shop.execute("update orders set counter = 5")
        run.wait_caught_up()
        run.assert_equal("orders")
        run.stop()
        assert run.destination.shutdowns == 1


class Slow(MemoryTables):
    """Holds the first copy until it is let go, and counts how many are at work at once."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.release = threading.Event(), threading.Event()
        self.at_work = self.most_at_work = 0

    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        self.at_work += 1
        self.most_at_work = max(self.at_work, self.most_at_work)
        try:
            if not self.begun.is_set():
                self.begun.set()
                assert self.release.wait(60)
            super().write_table_rows(replicated_table_schema, table_rows, result)
        finally:
            self.at_work -= 1


@pytest.mark.promise("an invalidated slot, with each behaviour")
def test_a_slot_lost_while_a_table_is_copied_leads_to_a_new_copy_after_the_destination_has_left_the_old_one(
    shop: Database,
) -> None:
    slow = Slow()
    with running(shop, slow, invalidated_slot_behavior=RECREATE) as run:
        assert slow.begun.wait(30)
        drop_under_its_reader(shop)
        run.wait_for(lambda: "destination to leave" in (run.pipeline.progress.snapshot().waiting or ""))
        shop.execute("update orders set counter = 5")
        slow.release.set()
        run.wait_states("ready", 1)
        run.wait_caught_up()
        run.assert_equal("orders")
        # The old one could not go on: lock and exported snapshot went with its worker.
        assert slow.copies == ["orders"]
        assert slow.most_at_work == 1
