"""The engine over a real server, into tables in memory: hand-off, confirming, restarts, errors."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence

import pytest

from headwater.config import BatchConfig, InvalidatedSlotBehavior
from headwater.contracts.stores import APPLY, WorkerType
from headwater.errors import (
    ConnectionLost,
    DestinationError,
    DestinationUnavailable,
    HeadwaterError,
    PipelineLocked,
    SlotError,
    StoreUnavailable,
)
from headwater.events import EventBatch, Insert, TableRows
from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.source.slots import apply_slot_name
from headwater.states import TableState
from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from headwater.testing.compare import confirmed_position, wait_until
from headwater.testing.postgres import PostgresServer
from tests.background_writes import writing
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import config, running

SLOT = apply_slot_name(1)


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        """
        create table orders(id int primary key, counter int not null, note text);
        insert into orders select i, 1, case when i % 50 = 0 then repeat(md5(i::text), 300) else 'n' end
            from generate_series(1, 5000) i;
        create table items(id int primary key, counter int not null, note text);
        insert into items select i, 1, 'i' from generate_series(1, 1000) i;
        create publication shop for table orders, items;
        """
    )
    return database


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
@pytest.mark.promise("Ready is reached under heavy traffic")
@pytest.mark.promise("rows written during the copy are neither lost nor doubled")
@pytest.mark.versions
def test_rows_written_during_the_copy_are_neither_lost_nor_doubled(shop: Database) -> None:
    with writing(shop), running(shop) as run:
        run.wait_states("ready", 2)
        before = len(run.destination.batches)
        run.wait_for(lambda: len(run.destination.batches) > before + 20)
        run.pipeline.shutdown()
        run.pipeline.wait()
    with running(shop, run.destination, run.pipeline._store) as again:
        again.wait_caught_up()
        again.assert_equal("orders", "items")
        assert sorted(again.destination.copies) == ["items", "orders"]


@pytest.mark.promise("Ready is reached with no traffic at all, by keepalives only")
@pytest.mark.promise("empty tables are created")
@pytest.mark.versions
def test_all_tables_reach_ready_with_no_traffic_at_all(database: Database) -> None:
    for number in range(12):
        database.execute(f"create table t{number}(id int primary key)")
    database.execute("create publication shop for all tables")
    with running(database) as run:
        run.wait_states("ready", 12)
        assert all(run.destination.tables[f"t{number}"] == {} for number in range(12))
    slots = database.execute("select slot_name from pg_replication_slots where database = current_database()")
    assert slots == [(SLOT,)]


class MoodyStore(MemoryStore):
    """Out of reach for some states."""

    failures = 0

    def update_table_states(self, updates: Sequence[tuple[TableId, TableState]]) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("not now", hint="later")
        super().update_table_states(updates)


def test_a_store_that_is_out_of_reach_for_a_state_is_waited_for(shop: Database) -> None:
    store = MoodyStore()
    with running(shop, store=store) as run:
        run.wait_states("ready", 2)
        store.failures = 3
        shop.execute("alter table items add column extra int default 7; update items set counter = 2 where id < 9")
        run.wait_for(lambda: run.destination.copies.count("items") >= 2)
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("orders", "items")


class WatchedStore(MemoryStore):
    """Looks at the slot whenever progress is recorded."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._connection = database.connect()
        self.early: list[tuple[int, EndLsn]] = []
        self.recorded: list[EndLsn] = []

    def upsert_replication_progress(self, worker_type: WorkerType, flush_lsn: EndLsn) -> EndLsn:
        if worker_type == APPLY:
            confirmed = confirmed_position(self._connection, SLOT)
            if confirmed >= flush_lsn.value and self.recorded:
                self.early.append((confirmed, flush_lsn))
            self.recorded.append(flush_lsn)
        return super().upsert_replication_progress(worker_type, flush_lsn)

    def close(self) -> None:
        self._connection.close()


def test_invariant_2_write_then_record_then_confirm(shop: Database) -> None:
    store = WatchedStore(shop)
    with running(shop, store=store) as run:
        run.wait_states("ready", 2)
        store.early.clear()  # a hand-off records what was confirmed while idle
        release = threading.Event()
        run.destination.before_events = lambda batch: _wait(release)
        recorded = len(store.recorded)
        shop.execute("update orders set counter = counter + 1 where id <= 10")
        lsn = int(shop.value("select pg_current_wal_flush_lsn() - '0/0'"))
        # Not written yet: neither recorded nor confirmed, however often the server asks.
        time.sleep(0.5)
        assert len(store.recorded) == recorded
        assert confirmed_position(shop.connection, SLOT) < lsn
        release.set()
        run.wait_caught_up()
        assert len(store.recorded) > recorded
        assert not store.early


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


@pytest.mark.promise("the destination fails before, during and after a batch")
@pytest.mark.invariant(2)
def test_a_destination_that_fails_is_tried_again_and_nothing_is_confirmed_meanwhile(shop: Database) -> None:
    with running(shop) as run:
        run.wait_states("ready", 2)
        failures = iter(range(3))

        def fail(batch: EventBatch) -> None:
            if next(failures, None) is not None:
                assert confirmed_position(shop.connection, SLOT) < batch.end_lsn.value
                raise DestinationError("not now", hint="later")

        run.destination.before_events = fail
        shop.execute("update orders set counter = 77 where id <= 10")
        run.wait_caught_up()
        assert next(failures, None) is None
        run.assert_equal("orders", "items")


def test_a_destination_that_keeps_failing_ends_the_run_with_its_error_and_nothing_is_confirmed(
    shop: Database,
) -> None:
    with running(shop, table_error_retry_max_attempts=2) as run:
        run.wait_states("ready", 2)
        run.wait_caught_up()
        attempts: list[EndLsn] = []

        def fail(batch: EventBatch) -> None:
            attempts.append(batch.end_lsn)
            raise DestinationError("broken for good", hint="mend it")

        run.destination.before_events = fail
        shop.execute("update orders set counter = 77 where id <= 10")
        with pytest.raises(DestinationError, match="broken for good"):
            run.pipeline.wait(30)
        assert len(attempts) == 3
        assert confirmed_position(shop.connection, SLOT) < attempts[0].value


def test_invariant_4_a_transaction_beyond_the_memory_budget_is_one_batch(shop: Database) -> None:
    small = BatchConfig(max_bytes=65536, memory_budget_ratio=1e-9, max_fill_ms=100)
    with running(shop, batch=small) as run:
        run.wait_states("ready", 2)
        shop.execute("insert into orders select i, 1, repeat('x', 2000) from generate_series(10000, 60000) i")
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert max(batch.change_count for batch in run.destination.batches) == 50001


def test_invariant_8_the_connection_is_answered_while_the_destination_writes() -> None:
    with PostgresServer.start(settings={"wal_sender_timeout": "1500ms"}) as server, server.connect() as connection:
        shop = Database(server, "postgres", connection)
        shop.execute("create table orders(id int primary key); create publication shop for table orders")
        with running(shop) as run:
            run.wait_states("ready", 1)
            sender = shop.value("select active_pid from pg_replication_slots where slot_name = %s", [SLOT])
            begun, release = threading.Event(), threading.Event()

            def block(batch: EventBatch) -> None:
                begun.set()
                assert release.wait(30)

            run.destination.before_events = block
            shop.execute("insert into orders select generate_series(1, 10)")
            assert begun.wait(60)
            # Three timeouts long; a client that says nothing loses its walsender after one.
            time.sleep(4.5)
            release.set()
            run.wait_caught_up()
            assert shop.value("select active_pid from pg_replication_slots where slot_name = %s", [SLOT]) == sender
            run.assert_equal("orders")


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_invariant_9_an_idle_pipeline_writes_nothing_and_its_slot_advances(shop: Database, seconds: int) -> None:
    shop.execute("drop publication shop; create publication shop for all tables")
    store = PostgresStore(shop.settings, 1)
    with running(shop, store=store) as run:
        run.wait_states("ready", 2)
        # WAL that concerns nobody, in the database and of the store itself: the slot follows it all.
        shop.execute("create temp table unpublished(x int)")
        run.wait_caught_up()
        before, batches = _store_rows(shop), len(run.destination.batches)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            shop.execute("insert into unpublished values (1)")
            shop.execute("select pg_logical_emit_message(true, 'x', 'y')")
            time.sleep(0.25)
        run.wait_caught_up()
        assert _store_rows(shop) == before
        assert len(run.destination.batches) == batches


def _store_rows(shop: Database) -> list[tuple[object, ...]]:
    rows = []
    for table in ("table_states", "table_schemas", "destination_tables", "replication_progress"):
        rows += shop.execute(f"select '{table}', xmin::text, ctid::text from headwater.{table} order by 2, 3")
    return rows


@pytest.mark.promise("a second start is refused")
@pytest.mark.invariant(6)
def test_a_second_run_of_the_same_pipeline_is_refused(shop: Database) -> None:
    with running(shop) as run:
        run.wait_states("ready", 2)
        with pytest.raises(PipelineLocked) as caught, running(shop):
            pass
        assert caught.value.hint
        with pytest.raises(HeadwaterError, match="started before"):
            run.pipeline.start()


@pytest.mark.promise("the destination is shut down once")
def test_the_destination_is_shut_down_once(shop: Database) -> None:
    with running(shop) as run:
        run.wait_states("ready", 2)
        run.stop()
        run.pipeline.shutdown()
    assert run.destination.shutdowns == 1


@pytest.mark.promise("a copy that waits for its result is interrupted by shutdown")
@pytest.mark.promise("errors caused by shutdown are not recorded")
def test_shutdown_interrupts_a_copy_that_waits_for_its_result_and_no_error_is_recorded(shop: Database) -> None:
    destination, store, begun, release = MemoryTables(), MemoryStore(), threading.Event(), threading.Event()

    def block(rows: TableRows) -> None:
        begun.set()
        release.wait(30)

    destination.before_copy = block
    with running(shop, destination, store) as run:
        assert begun.wait(30)
        run.stop()
        release.set()
    assert {state.phase.value for state in store.get_table_states().values()} <= {"init", "data_sync"}


@pytest.mark.promise("after a lost walsender nothing is lost and nothing written twice")
@pytest.mark.versions
def test_changes_go_on_after_the_walsender_was_ended(shop: Database) -> None:
    with running(shop) as run:
        run.wait_states("ready", 2)
        with writing(shop):
            for _ in range(3):
                before = len(run.destination.batches)
                shop.execute(
                    "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", [SLOT]
                )
                run.wait_for(lambda before=before: len(run.destination.batches) > before + 3)  # type: ignore[misc]
        run.wait_caught_up()
        run.assert_equal("orders", "items")


@pytest.mark.promise("after a server restart nothing is lost and nothing written twice")
def test_changes_go_on_after_the_server_restarted() -> None:
    with PostgresServer.start() as server:
        connection = server.connect()
        shop = Database(server, "postgres", connection)
        shop.execute("create table orders(id int primary key, counter int); create publication shop for table orders")
        with running(shop) as run:
            run.wait_states("ready", 1)
            shop.execute("insert into orders select i, 1 from generate_series(1, 100) i")
            connection.close()
            server.restart()
            with server.connect() as again:
                shop = Database(server, "postgres", again)
                run.database = shop
                shop.execute("update orders set counter = counter + 1")
                run.wait_caught_up()
                run.assert_equal("orders")


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
@pytest.mark.promise("after a killed driver nothing is lost and nothing written twice")
@pytest.mark.versions
def test_a_restart_delivers_nothing_twice_that_was_confirmed(shop: Database) -> None:
    store, destination = MemoryStore(), MemoryTables()
    for turn in range(3):
        with running(shop, destination, store) as run:
            run.wait_states("ready", 2)
            shop.execute(f"update orders set counter = {turn} where id <= 100")
            run.wait_caught_up()
            run.stop()
    updates = sum(batch.change_count for batch in destination.batches)
    assert updates == 300
    assert sorted(destination.copies) == ["items", "orders"]


@pytest.mark.promise("a table whose schema changes ends equal")
@pytest.mark.versions
def test_a_table_whose_schema_changes_is_copied_again_and_ends_equal(shop: Database) -> None:
    with running(shop) as run:
        run.wait_states("ready", 2)
        with writing(shop):
            shop.execute("alter table items add column extra int default 7")
            run.wait_for(lambda: run.destination.copies.count("items") == 2)
            run.wait_states("ready", 2)
        run.wait_caught_up()
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert run.destination.copies.count("orders") == 1


@pytest.mark.promise("a missing slot")
@pytest.mark.versions
def test_invariant_10_a_lost_slot_is_an_error_unless_recreate_was_chosen(shop: Database) -> None:
    store, destination = MemoryStore(), MemoryTables()
    with running(shop, destination, store) as run:
        run.wait_states("ready", 2)
        run.stop()
    shop.execute("select pg_drop_replication_slot(%s)", [SLOT])
    shop.execute("update orders set counter = 99")
    with pytest.raises(SlotError) as caught, running(shop, destination, store):
        pass
    assert caught.value.hint
    with running(shop, destination, store, invalidated_slot_behavior=InvalidatedSlotBehavior.RECREATE) as run:
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("orders", "items")
    assert destination.copies.count("orders") == 2


def test_a_stop_between_two_attempts_at_a_batch_confirms_nothing_past_it(shop: Database) -> None:
    store, destination = MemoryStore(), MemoryTables()
    with running(shop, destination, store) as run:
        run.wait_states("ready", 2)
        attempts: list[EventBatch] = []

        def away(batch: EventBatch) -> None:
            attempts.append(batch)
            raise DestinationUnavailable("the lake is away", hint="wait")

        destination.before_events = away
        shop.execute("update orders set counter = 11 where id = 1")
        run.wait_for(lambda: len(attempts) >= 1)
        shop.execute("update orders set counter = 12 where id = 2")
        destination.before_events = lambda batch: None
        run.stop()
    with running(shop, destination, store) as run:
        run.wait_caught_up()
        run.assert_equal("orders", "items")


class StoreThatGoesAway(MemoryStore):
    away = False

    def update_table_states(self, updates: Sequence[tuple[TableId, TableState]]) -> None:
        if self.away:
            raise StoreUnavailable("the store is away", hint="wait")
        super().update_table_states(updates)


def test_a_table_whose_worker_failed_while_the_store_was_unreachable_gets_a_worker_again(shop: Database) -> None:
    store, destination, failed = StoreThatGoesAway(), MemoryTables(), threading.Event()

    def fail_once(rows: TableRows) -> None:
        if not failed.is_set():
            store.away = True
            failed.set()
            raise ConnectionLost("the server went away", hint="wait")

    destination.before_copy = fail_once
    with running(shop, destination, store) as run:
        assert failed.wait(30)
        run.wait_for(lambda: bool(run.pipeline.progress.snapshot().errors))
        store.away = False
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("orders", "items")


@pytest.mark.invariant(11)
@pytest.mark.invariant(15)
def test_a_value_the_lake_cannot_hold_stops_its_table_and_no_other(shop: Database) -> None:
    shop.execute("create table dates(id int primary key, day date); alter publication shop add table dates")
    with running(shop) as run:
        run.wait_states("ready", 3)
        shop.execute("insert into dates values (1, 'infinity'); update orders set counter = 5 where id <= 10")
        run.wait_states("errored", 1)
        run.wait_caught_up()
        assert run.states()["public.dates"] == "errored"
        run.assert_equal("orders", "items")


@pytest.mark.versions
def test_types_without_a_binary_decoder_arrive_as_their_text(database: Database) -> None:
    database.execute(
        """
        create table odd(id int primary key, i interval, n inet, r int4range, t time, c char(5), x bytea, a inet[]);
        insert into odd values (1, '1 day 02:03', '10.0.0.1/8', '[1,5)', '24:00', 'ab', '\\x00ff', '{10.0.0.1,NULL}');
        create publication shop for table odd
        """
    )
    with running(database) as run:
        run.wait_states("ready", 1)
        database.execute("insert into odd select id + 1, i, n, r, t, c, x, a from odd")
        database.execute("insert into odd(id) values (9)")
        run.wait_caught_up()
        expected = database.execute(
            "select id, i::text, host(n) || '/8', r::text, t::text, c::text || '   ', x, a::text from odd"
        )
        assert run.destination.tables["odd"] == {row[0]: row for row in expected}


@pytest.mark.promise("DDL during the copy")
@pytest.mark.invariant(1)
@pytest.mark.parametrize("moment", ["while it reads", "before it reads"])
def test_vacuum_full_and_a_rewriting_alter_during_a_copy_end_equal(shop: Database, moment: str) -> None:
    """While ranges are read the statements wait for the copy; before, copy and statements would wait for each other."""
    destination, release = MemoryTables(), threading.Event()
    both = threading.Barrier(3)

    def block(rows: TableRows) -> None:
        if not release.is_set():
            both.wait(30)
            assert release.wait(60)

    if moment == "while it reads":
        destination.during_copy = block
    else:
        destination.before_copy = block
    shop.execute("delete from orders where id % 2 = 0")
    statements = ["vacuum full orders", "alter table items alter column counter type bigint"]

    def execute(statement: str) -> None:
        with shop.connect() as connection:
            connection.execute(statement)

    with running(shop, destination) as run:
        both.wait(30)
        threads = [threading.Thread(target=execute, args=(statement,)) for statement in statements]
        for thread in threads:
            thread.start()
        waiting = "select count(*) from pg_locks where not granted and mode = 'AccessExclusiveLock'"
        wait_until(lambda: shop.value(waiting) == 2, 30, what="both statements to wait")
        release.set()
        for thread in threads:
            thread.join()
        copied = list(destination.copies)
        shop.execute("update items set counter = counter + 1 where id <= 3")
        run.wait_for(lambda: destination.copies.count("items") >= (2 if moment == "while it reads" else 1))
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        if moment == "while it reads":
            assert sorted(copied) == ["items", "orders"], "the statements did not wait for the copies"
            assert destination.copies.count("orders") == 1


def test_start_reports_all_findings_at_once(database: Database) -> None:
    database.execute("create table secretive(id int); create publication shop for table secretive")
    with pytest.raises(HeadwaterError) as caught, running(database, publication="missing"):
        pass
    assert "missing" in str(caught.value)
    assert caught.value.hint


def test_settings_that_cannot_work_are_refused_when_the_pipeline_is_made(database: Database) -> None:
    with pytest.raises(HeadwaterError):
        config(database, id=0).validate()


@pytest.mark.security
def test_pauses_grow_while_the_servers_sessions_end_without_progress(
    shop: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """A transaction that ends the server's session each time is not sent again as fast as the server can start sessions."""
    said = re.compile(r"following the slot failed, retrying in (\d+\.\d+) s")
    with running(shop) as run:
        run.wait_states("ready", 2)
        run.wait_caught_up()
        for count in range(1, 4):
            wait_until(lambda: bool(shop.execute(END_READER, [apply_slot_name(1)])))
            run.wait_for(lambda count=count: len(said.findall(caplog.text)) >= count)  # type: ignore[misc]
        pauses = [float(seconds) for seconds in said.findall(caplog.text)]
        assert pauses[0] <= 0.5 < 1.0 <= pauses[2]
        shop.execute("update orders set counter = 7 where id = 1")
        run.wait_caught_up()
        assert re.search(r"following the slot succeeded after \d+ failed attempts", caplog.text)


END_READER = """
select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s and active_pid is not null
"""


def test_a_destination_without_metadata_gets_no_row_that_lacks_a_column_of_the_copy(database: Database) -> None:
    """Values would stand in the places of others: the table is copied again instead, before any such row."""
    database.execute(
        "create table orders(id int primary key, gone text, counter int); insert into orders values (1, 'x', 1);"
        "create publication shop for table orders"
    )
    with running(database) as run:
        run.wait_states("ready", 1)
        run.wait_caught_up()
        # In one transaction: no look at the catalog comes between.
        database.execute("begin; alter table orders drop column gone; insert into orders values (2, 5); commit")
        run.wait_for(lambda: run.destination.copies.count("orders") == 2)
        run.wait_states("ready", 1)
        run.wait_caught_up()
        run.assert_equal("orders")
        rows = [event.new for batch in run.destination.batches for event in batch.events() if isinstance(event, Insert)]
        assert all(len(row) == 3 for row in rows)
