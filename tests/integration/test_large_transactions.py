"""Large transactions: sent while in progress, rolled back in part, kept on disk, and short memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headwater.config import BatchConfig, MemoryBackpressureConfig
from headwater.contracts.results import WriteEventsResult
from headwater.contracts.stores import APPLY
from headwater.destinations.memory import MemoryDestination
from headwater.engine.follow import slot_stream
from headwater.engine.follow.slot_stream import SlotStream
from headwater.engine.memory import memory_now
from headwater.engine.pipeline import Pipeline
from headwater.errors import ConfigError
from headwater.events import EventBatch, TableRows
from headwater.source.slots import apply_slot_name
from headwater.store.memory import MemoryStore
from headwater.testing.compare import confirmed_position, flush_position, wait_until
from headwater.testing.memory import PeakMemory
from headwater.testing.postgres import PostgresServer
from headwater.wire import pgoutput
from headwater.wire.connection import WireConnection
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import RunningPipeline, config, running
from tests.pipeline_process import pipeline_process

SLOT = apply_slot_name(1)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """With so little memory for decoding that a thousand rows are a large transaction."""
    with PostgresServer.start(settings={"logical_decoding_work_mem": "64kB"}) as server:
        yield server


@pytest.fixture
def shop(server: PostgresServer) -> Iterator[Database]:
    with server.connect() as connection:
        shop = Database(server, "postgres", connection)
        shop.execute(
            """
            select pg_drop_replication_slot(slot_name) from pg_replication_slots;
            drop publication if exists shop;
            drop table if exists orders, items;
            create table orders(id int primary key, counter int not null, note text);
            create table items(id int primary key, counter int not null, note text);
            insert into orders select i, 1, 'n' from generate_series(1, 500) i;
            create publication shop for table orders, items;
            """
        )
        yield shop


def streamed(shop: Database) -> int:
    """How many transactions the server has sent in progress so far."""
    return int(shop.value("select stream_txns from pg_stat_replication_slots where slot_name = %s", [SLOT]))


def wait_streamed(shop: Database, count: int) -> None:
    wait_until(lambda: streamed(shop) >= count, 30)


@pytest.mark.promise("a transaction of several million rows")
@pytest.mark.invariant(4)
def test_a_large_transaction_is_sent_in_progress_and_is_one_batch_without_what_was_rolled_back(shop: Database) -> None:
    with running(shop) as run, shop.server.connect() as other:
        run.wait_states("ready", 2)
        with other.transaction():
            other.execute("insert into orders select i, 1, repeat('x', 100) from generate_series(1001, 6000) i")
            with other.transaction(force_rollback=True):
                other.execute("insert into items select i, 1, repeat('y', 100) from generate_series(1, 5000) i")
                other.execute("update orders set counter = 2")
            other.execute("update orders set counter = 3 where id % 2 = 0")
            # Meanwhile, others commit: they are written before the large one is whole.
            wait_streamed(shop, 1)
            shop.execute("insert into items select generate_series(10001, 10010), 1, 'while it is in progress'")
            run.wait_caught_up()
            assert len(run.destination.tables["items"]) == 10
            assert len(run.destination.tables["orders"]) == 500
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert run.destination.batches[-1].change_count == 5000 + 2750


def test_a_large_transaction_that_is_rolled_back_leaves_nothing_and_the_slot_advances(shop: Database) -> None:
    with running(shop) as run, shop.server.connect() as other:
        run.wait_states("ready", 2)
        with other.transaction(force_rollback=True):
            other.execute("insert into orders select i, 1, repeat('x', 100) from generate_series(1001, 6000) i")
            wait_streamed(shop, 1)
        batches = len(run.destination.batches)
        shop.execute("insert into items values (1, 1, 'after')")
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert sum(batch.change_count for batch in run.destination.batches[batches:]) == 1


@pytest.mark.invariant(3)
def test_what_is_in_progress_when_the_connection_is_lost_comes_again_as_a_whole(shop: Database) -> None:
    with running(shop) as run, shop.server.connect() as other:
        run.wait_states("ready", 2)
        with other.transaction():
            other.execute("insert into orders select i, 1, repeat('x', 100) from generate_series(1001, 6000) i")
            wait_streamed(shop, 1)
            before = streamed(shop)
            shop.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", [SLOT]
            )
            wait_streamed(shop, before + 1)
            other.execute("update orders set note = 'later'")
        run.wait_caught_up()
        run.assert_equal("orders", "items")


@pytest.mark.invariant(3)
def test_random_large_transactions_side_by_side_end_equal_and_their_keys_do_not_depend_on_the_way(
    shop: Database,
) -> None:
    store, destination = MemoryStore(), MemoryTables()
    with running(shop, store=store, destination=destination) as run:
        run.wait_states("ready", 2)
        start = store.get_replication_progress(APPLY)
        assert start is not None
        shop.execute("select pg_copy_logical_replication_slot(%s, 'whole')", [SLOT])
        writers = [threading.Thread(target=_write, args=(shop.server, number)) for number in range(3)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert streamed(shop) > 3
    # The same transactions as the server sends them at commit, decoded by the server itself.
    found = shop.execute(
        "select count(*) from pg_logical_slot_get_binary_changes('whole', null, null,"
        " 'proto_version', '1', 'publication_names', 'shop') where get_byte(data, 0) in (68, 73, 85)"
    )
    keys = [
        (table, int(lsn), int(ordinal))
        for batch in destination.batches
        for table, steps in batch.tables.items()
        for step in steps
        for lsn, ordinal in zip(step.commit_lsn, step.ordinal, strict=True)  # type: ignore[arg-type]
    ]
    assert len(keys) == len(set(keys)) == found[0][0]


def _write(server: PostgresServer, number: int) -> None:
    """Nested savepoints, some rolled back, in transactions of some thousand rows; each writer has keys of its own."""
    choose = random.Random(number)
    first = 100_000 * (number + 1)
    with server.connect() as connection:
        for _ in range(6):
            with connection.transaction(force_rollback=choose.random() < 0.2):
                for _ in range(choose.randint(1, 6)):
                    _write_some(connection, choose, first, depth=0)


def _write_some(connection: psycopg.Connection[object], choose: random.Random, first: int, depth: int) -> None:
    table = choose.choice(["orders", "items"])
    low = first + choose.randrange(3000)
    connection.execute(
        f"insert into {table} select i, 1, repeat('x', 60) from generate_series({low}, {low + 400}) i"
        " on conflict (id) do update set counter = excluded.counter + 1"
    )
    connection.execute(f"delete from {table} where id between {low} and {low + 20}")
    while depth < 3 and choose.random() < 0.6:
        with connection.transaction(force_rollback=choose.random() < 0.4):
            _write_some(connection, choose, first, depth + 1)


def test_a_table_is_copied_while_a_large_transaction_is_in_progress(shop: Database) -> None:
    """The slot of the copy waits for the transaction; what it did is in the copy, and the stream does not bring it twice."""
    with shop.server.connect() as other:
        with running(shop) as run:
            run.wait_states("ready", 2)
            with other.transaction():
                other.execute("insert into orders select i, 1, repeat('x', 100) from generate_series(1001, 6000) i")
                wait_streamed(shop, 1)
                shop.execute("create table late(id int primary key, counter int not null, note text)")
                shop.execute("alter publication shop add table late")
            run.wait_states("ready", 3)
            with other.transaction():
                other.execute("insert into late select i, 1, repeat('x', 100) from generate_series(1, 5000) i")
            run.wait_caught_up()
            run.assert_equal("orders", "late")
        shop.execute("drop table late")


@pytest.mark.promise("no change is lost or doubled, whoever is quicker")
def test_tables_are_handed_over_while_a_large_transaction_of_theirs_is_in_progress_and_get_all_of_it(
    shop: Database,
) -> None:
    """Both slots have blocks of it that nobody may have seen: it belongs to whom the table belongs to when it commits."""
    destination, copied, release = MemoryTables(), threading.Event(), threading.Event()

    def hold(rows: TableRows) -> None:
        if len(destination.copies) > 2:
            copied.set()
            assert release.wait(60)

    destination.after_copy = hold
    insert = "insert into {} select i, 1, repeat('x', 100) from generate_series({}, {}) i"
    with shop.server.connect() as other:
        with running(shop, destination) as run:
            run.wait_states("ready", 2)
            for name in ("late", "later"):
                shop.execute(f"create table {name}(id int primary key, counter int not null, note text)")
            shop.execute("alter publication shop add table late, later")
            assert copied.wait(30)
            with other.transaction():
                for name in ("late", "orders", "later"):
                    other.execute(insert.format(name, 10001, 12000))
                with other.transaction(force_rollback=True):
                    other.execute(insert.format("later", 20001, 22000))
                wait_streamed(shop, 1)
                release.set()
                run.wait_states("ready", 4)
                other.execute("update late set counter = 2")
            run.wait_caught_up()
            run.assert_equal("orders", "late", "later")
            assert sorted(destination.copies) == ["items", "late", "later", "orders"]
        shop.execute("drop table late, later")


class WatchedStream(SlotStream):
    """Lets a test see what the apply worker has not taken in."""

    newest: WatchedStream

    def __init__(self, connection: WireConnection, slot: str, *rest: Any) -> None:
        super().__init__(connection, slot, *rest)
        if slot == SLOT:
            WatchedStream.newest = self

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes


@pytest.mark.parametrize("decoding_memory", ["64kB", "64MB"], ids=["in progress", "at commit"])
def test_short_memory_pauses_reading_while_a_batch_is_written_and_never_for_good(
    shop: Database, decoding_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_stream, "SlotStream", WatchedStream)
    shop.execute(f"alter system set logical_decoding_work_mem = '{decoding_memory}'")
    shop.execute("select pg_reload_conf()")
    # Always short: nothing but the rule itself keeps the pipeline going.
    short = MemoryBackpressureConfig(activate=1e-6, resume=1e-7)
    with running(shop, memory_backpressure=short, memory_refresh_interval_ms=10) as run:
        run.wait_states("ready", 2)
        begun, release = threading.Event(), threading.Event()

        def block(batch: EventBatch) -> None:
            begun.set()
            assert release.wait(60)

        run.destination.before_events = block
        shop.execute("insert into items values (1, 1, 'holds the destination')")
        assert begun.wait(30)
        shop.execute("insert into orders select i, 1, repeat('x', 100) from generate_series(10001, 40000) i")
        # All of it gathers in the reader's queue, which is bounded: taken in, it would not.
        run.wait_for(lambda: WatchedStream.newest.queued_bytes > 30_000 * 100)
        release.set()
        run.wait_caught_up()
        run.assert_equal("orders", "items")
    shop.execute("alter system reset logical_decoding_work_mem")
    shop.execute("select pg_reload_conf()")


def test_a_spool_directory_that_cannot_be_used_is_said_at_the_start(shop: Database, tmp_path: Path) -> None:
    nowhere = BatchConfig(spool_directory=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="spool_directory") as caught, running(shop, batch=nowhere):
        pass
    assert "Make the directory" in caught.value.hint


@pytest.mark.promise("a transaction of several million rows")
def test_a_missing_spool_directory_is_waited_for_and_nothing_is_confirmed_meanwhile(
    shop: Database, tmp_path: Path
) -> None:
    directory = tmp_path / "spool"
    directory.mkdir()
    small = BatchConfig(max_bytes=1024, memory_budget_ratio=1e-9, spool_directory=str(directory))
    with running(shop, batch=small) as run:
        run.wait_states("ready", 2)
        directory.rmdir()
        shop.execute("insert into orders select i, 1, repeat('x', 200) from generate_series(10001, 20000) i")
        position = flush_position(shop.connection)
        run.wait_for(lambda: "could not be written to disk" in (run.pipeline.progress.snapshot().waiting or ""))
        assert confirmed_position(shop.connection, SLOT) < position
        directory.mkdir()
        run.wait_caught_up()
        run.assert_equal("orders")
        assert run.states() == {"public.orders": "ready", "public.items": "ready"}


@pytest.mark.promise("a deadline that is missed, and single tables that fail")
@pytest.mark.invariant(15)
def test_a_value_out_of_range_in_a_large_transaction_on_disk_errs_its_table_alone(
    shop: Database, tmp_path: Path
) -> None:
    """What was decoded until the value was met is decoded again, from the same files."""
    small = BatchConfig(max_bytes=1024, memory_budget_ratio=1e-9, spool_directory=str(tmp_path))
    shop.execute("alter table items add column day date")
    with running(shop, batch=small) as run, shop.server.connect() as other:
        run.wait_states("ready", 2)
        with other.transaction():
            other.execute("insert into orders select i, 1, repeat('x', 100) from generate_series(10001, 20000) i")
            other.execute("insert into items select i, 1, repeat('x', 100), 'infinity' from generate_series(1, 3000) i")
            with other.transaction(force_rollback=True):
                other.execute("alter table orders add column extra int default 7; update orders set counter = 2")
            other.execute("update orders set counter = 3 where id % 2 = 0")
        run.wait_caught_up()
        run.wait_states("errored", 1)
        run.assert_equal("orders")
        assert run.destination.copies.count("orders") == 1


def test_a_transaction_beyond_the_budget_lies_in_the_spool_directory(shop: Database, tmp_path: Path) -> None:
    small = BatchConfig(max_bytes=1024, memory_budget_ratio=1e-9, spool_directory=str(tmp_path))
    with running(shop, batch=small) as run:
        run.wait_states("ready", 2)
        mapped: list[bool] = []
        # Files without a name, so that nothing is left behind: only the list of what we have mapped tells of them.
        run.destination.before_events = lambda batch: mapped.append(
            str(tmp_path) in Path("/proc/self/maps").read_text()
        )
        shop.execute("insert into orders select i, 1, repeat('x', 200) from generate_series(10001, 20000) i")
        run.wait_caught_up()
        run.assert_equal("orders")
        assert any(mapped)
        assert list(tmp_path.iterdir()) == []


class CountingDestination(MemoryDestination):
    """Keeps nothing, so that what takes memory is the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        self.changes += events.change_count
        result.done()


@pytest.mark.promise("a transaction of several million rows")
@pytest.mark.invariant(4)
def test_a_transaction_larger_than_the_budget_takes_no_more_memory_than_a_small_one(
    shop: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgoutput, "SEGMENT_BYTES", 4 << 20)
    small = BatchConfig(max_bytes=1 << 20, memory_budget_ratio=1e-9, spool_directory=str(tmp_path))
    counting = CountingDestination()
    pipeline = Pipeline(config(shop, batch=small), MemoryStore(), counting)
    pipeline.start()
    try:
        run = RunningPipeline(shop, pipeline)
        run.wait_states("ready", 2)
        with PeakMemory() as few:
            shop.execute("insert into items select i, 1, repeat('x', 100) from generate_series(1, 50000) i")
            run.wait_caught_up()
        with PeakMemory() as many:
            shop.execute("insert into orders select i, 1, repeat('x', 100) from generate_series(1001, 1001000) i")
            run.wait_caught_up(120)
        assert counting.changes == 1_050_000
        # 150 MB came; of an ordinary batch's pieces, four megabytes each, some lie in memory at a time.
        assert many.bytes - few.bytes < 48 << 20
    finally:
        pipeline.shutdown()
        pipeline.wait(30)


@pytest.mark.promise("a transaction of several million rows")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_transaction_of_five_million_rows_streams_through_within_the_memory_that_was_set(
    server: PostgresServer, shop: Database, tmp_path: Path
) -> None:
    budget = 256 << 20
    extra = f"""
driver_memory = "2g"

[batch]
memory_budget_ratio = {budget / memory_now().total_bytes:.6f}
spool_directory = "{tmp_path}"
"""
    with pipeline_process(shop, tmp_path, extra=extra) as pipeline:
        pipeline.start()
        pipeline.wait_ready(2)
        with PeakMemory(pipeline.pid) as python, PeakMemory(pipeline.jvm()) as jvm:
            with shop.server.connect() as other, other.transaction():
                other.execute("insert into orders select i, 1, repeat('x', 50) from generate_series(1001, 5001000) i")
                with other.transaction(force_rollback=True):
                    other.execute("update orders set counter = counter + 1 where id % 5 = 0")
            pipeline.wait_caught_up(1200)
        pipeline.stop()
        pipeline.assert_equal("orders")
    print(f"Python {python.bytes >> 20} MiB, JVM {jvm.bytes >> 20} MiB at most")
    assert python.bytes < budget + (768 << 20)
    assert jvm.bytes < (2 << 30) + (1 << 30)
