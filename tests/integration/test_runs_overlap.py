"""Two runs of one pipeline may overlap for a moment: the one that lost the lock writes, records and confirms nothing more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from headwater.contracts.stores import APPLY, PipelineStore
from headwater.engine import run_lock
from headwater.engine.pipeline import Pipeline
from headwater.errors import HeadwaterError, PipelineLocked
from headwater.events import EventBatch, TableRows
from headwater.source.lock import LOCK_CLASS
from headwater.source.slots import apply_slot_name
from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from headwater.testing.compare import confirmed_position, flush_position, wait_until
from tests.conftest import Database
from tests.integration.counter_tables import create_counter_tables
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import RunningIntoMemory, config, running

SLOT = apply_slot_name(1)
LOCKS = """
    select pid from pg_locks l join pg_stat_activity a using (pid) where l.locktype = 'advisory'
      and a.application_name = 'headwater_lock_1' and a.datname = current_database() and l.granted = %s
"""


@pytest.fixture
def shop(database: Database) -> Database:
    create_counter_tables(database, orders=100, items=0)
    return database


def store_of(shop: Database) -> PostgresStore:
    return PostgresStore(shop.settings, 1)


def twin(destination: MemoryTables) -> MemoryTables:
    """Another run's view of the same lake: the same rows, batches of its own."""
    other = MemoryTables()
    other.tables, other.watermarks, other._names, other._lock = (
        destination.tables,
        destination.watermarks,
        destination._names,
        destination._lock,
    )
    return other


def wait_held(shop: Database) -> None:
    wait_until(lambda: bool(shop.execute(LOCKS, [True])), 10, what="the run to hold its lock")


def end_lock(shop: Database) -> None:
    wait_held(shop)
    shop.execute(f"select pg_terminate_backend(pid, 10000) from ({LOCKS}) holders", [True])


@contextmanager
def lock_taken(shop: Database) -> Iterator[None]:
    """By a session that does nothing else: the run loses the lock, and all else that it has stays."""
    with shop.connect(application_name="headwater_lock_1") as other:
        query = ("select pg_advisory_lock(%s, 1)", [LOCK_CLASS])
        waiting = threading.Thread(target=lambda: other.execute(*query))
        waiting.start()
        wait_until(lambda: bool(shop.execute(LOCKS, [False])), 10, what="another session to wait for the lock")
        end_lock(shop)
        waiting.join(30)
        yield


@contextmanager
def taking_over(shop: Database, destination: MemoryTables, store: PipelineStore) -> Iterator[RunningIntoMemory]:
    """Another run that waits for the lock when the first one's session is ended."""
    pipeline = Pipeline(config(shop), store, destination)
    starting = threading.Thread(target=pipeline.start)
    starting.start()
    try:
        wait_until(lambda: bool(shop.execute(LOCKS, [False])), 10, what="the other run to wait for the lock")
        end_lock(shop)
        starting.join(60)
        yield RunningIntoMemory(shop, pipeline, destination)
    finally:
        pipeline.shutdown()
        starting.join(60)
        with suppress(HeadwaterError):
            pipeline.wait(30)


@pytest.mark.invariant(6)
def test_a_run_whose_lock_another_took_ends_without_another_batch_and_the_other_ends_equal(shop: Database) -> None:
    destination, begun, release = MemoryTables(), threading.Event(), threading.Event()

    def block(batch: EventBatch) -> None:
        begun.set()
        assert release.wait(60)

    with running(shop, destination, store_of(shop)) as first:
        first.wait_states("ready", 2)
        first.wait_caught_up()
        destination.before_events = block
        shop.execute("update orders set counter = 2 where id <= 10")
        assert begun.wait(30)
        # Behind the batch under way: an orderly stop would write it.
        shop.execute("update items set counter = 2; insert into items values (1, 1)")
        received = flush_position(shop.connection)
        assert first.pipeline.progress.wait_for(lambda now: now.received >= received, 30)
        with taking_over(shop, twin(destination), store_of(shop)) as second:
            release.set()
            with pytest.raises(PipelineLocked):
                first.pipeline.wait(60)
            assert len(destination.batches) == 1, "the run that lost the lock wrote another batch"
            second.wait_states("ready", 2)
            shop.execute("update orders set counter = 3 where id <= 20")
            second.wait_caught_up()
            second.assert_equal("orders", "items")
            second.stop()


@pytest.mark.invariant(6)
def test_a_copy_of_a_run_that_lost_its_lock_leaves_the_slots_of_the_other_run_alone(shop: Database) -> None:
    destination, begun, release = MemoryTables(), threading.Event(), threading.Event()

    def block(rows: TableRows) -> None:
        begun.set()
        assert release.wait(60)

    destination.before_copy = block
    with running(shop, destination, store_of(shop)) as first:
        assert begun.wait(30)
        held, let_go = threading.Event(), threading.Event()
        other = twin(destination)

        def hold(rows: TableRows) -> None:
            held.set()
            assert let_go.wait(60)

        other.before_copy = hold
        with taking_over(shop, other, store_of(shop)) as second:
            assert held.wait(30)
            names = "select slot_name from pg_replication_slots where database = current_database() order by 1"
            slots = shop.execute(names)
            release.set()
            with pytest.raises(PipelineLocked):
                first.pipeline.wait(60)
            assert shop.execute(names) == slots
            let_go.set()
            second.wait_states("ready", 2)
            second.wait_caught_up()
            second.assert_equal("orders", "items")
            second.stop()


@pytest.mark.invariant(6)
def test_a_run_that_takes_its_lock_again_continues_unless_another_run_began_meanwhile(shop: Database) -> None:
    with running(shop, store=store_of(shop)) as run:
        run.wait_states("ready", 2)
        end_lock(shop)
        shop.execute("update orders set counter = 2")
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        wait_held(shop)
        # Another run had the lock and ended: seen in the store alone.
        other = store_of(shop)
        other.start()
        other.begin_run("another")
        other.close()
        batches = len(run.destination.batches)
        end_lock(shop)
        with pytest.raises(PipelineLocked, match="taken over"):
            run.pipeline.wait(60)
        assert len(run.destination.batches) == batches


@pytest.mark.invariant(6)
def test_a_process_that_was_stopped_asks_for_its_lock_before_it_writes(
    shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the supervisor had not run for a while: what it knew of the lock does not count any more."""
    monkeypatch.setattr(run_lock, "_FRESH_SECONDS", 0.0)
    with running(shop, store=store_of(shop)) as run:
        run.wait_states("ready", 2)
        run.wait_caught_up()
        monkeypatch.setattr(run.pipeline, "_watch", lambda: None)
        with lock_taken(shop):
            shop.execute("update orders set counter = 2")
            with pytest.raises(PipelineLocked):
                run.pipeline.wait(60)
        assert not run.destination.batches


@pytest.mark.invariant(6)
def test_a_run_that_lost_its_lock_is_no_orderly_stop_and_leaves_what_it_has_read_unwritten(shop: Database) -> None:
    """Into a store that does not know of runs: nothing but the lock keeps the run from writing."""
    destination, begun, release, store = MemoryTables(), threading.Event(), threading.Event(), MemoryStore()

    def block(batch: EventBatch) -> None:
        begun.set()
        assert release.wait(60)

    with running(shop, destination, store) as run:
        run.wait_states("ready", 2)
        run.wait_caught_up()
        destination.before_events = block
        shop.execute("update orders set counter = 2")
        assert begun.wait(30)
        shop.execute("insert into items values (1, 1)")
        end = flush_position(shop.connection)
        assert run.pipeline.progress.wait_for(lambda now: now.received >= end, 30)
        recorded, confirmed = store.get_replication_progress(APPLY), confirmed_position(shop.connection, SLOT)
        with lock_taken(shop):
            assert run.pipeline._stop.wait(30)
            release.set()
            with pytest.raises(PipelineLocked):
                run.pipeline.wait(60)
        assert len(destination.batches) == 1
        assert store.get_replication_progress(APPLY) == recorded
        assert confirmed_position(shop.connection, SLOT) == confirmed
