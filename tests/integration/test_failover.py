"""A primary is lost and its standby promoted: the pipeline goes on where it was, or says why it cannot (invariant 10)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from headwater.config.pipeline import InvalidatedSlotBehavior
from headwater.contracts.stores import PipelineStore
from headwater.errors import PreflightError
from headwater.events import TableRows
from headwater.source.slot_errors import SlotMissing, TimelineLeft
from headwater.source.slots import apply_slot_name
from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from headwater.testing.postgres import PostgresServer
from headwater.testing.standby import PHYSICAL_SLOT, promote, standby_of, stop_following, wait_replayed, wait_synced
from headwater.wire.settings import TargetSessionAttrs
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import config, running

SLOT = apply_slot_name(1)
SYNCING = {"sync_replication_slots": "on"}


@contextmanager
def database_of(server: PostgresServer) -> Iterator[Database]:
    with server.connect() as connection:
        yield Database(server, "postgres", connection)


@contextmanager
def shop_with_standby(
    version: int, synchronized: str = "", **standby_settings: str
) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A small shop on a primary, and a standby that follows it."""
    settings = {"synchronized_standby_slots": synchronized} if version >= 17 else {}
    with PostgresServer.start(version=version, settings=settings) as primary:
        with database_of(primary) as shop:
            shop.execute("create table orders(id int primary key, counter int)")
            shop.execute("insert into orders select i, 0 from generate_series(1, 100) i")
            shop.execute("create publication shop for table orders")
        with standby_of(primary, settings=standby_settings) as standby:
            yield primary, standby


def confirmed(shop: Database) -> str:
    return str(shop.value("select confirmed_flush_lsn from pg_replication_slots where slot_name = %s", [SLOT]))


@pytest.mark.promise("a pipeline goes on at a promoted standby that synced its slot")
@pytest.mark.invariant(10)
@pytest.mark.parametrize(
    ("version", "stored"),
    [
        pytest.param(17, "in the source", marks=pytest.mark.versions),
        (18, "elsewhere"),
        pytest.param(17, "elsewhere", marks=[pytest.mark.versions, pytest.mark.slow]),
        pytest.param(18, "in the source", marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_continues_at_a_promoted_standby_that_synced_its_slot(version: int, stored: str) -> None:
    destination, memory = MemoryTables(), MemoryStore()

    def store(server: PostgresServer) -> PipelineStore:
        return PostgresStore(server.settings(), 1) if stored == "in the source" else memory

    with shop_with_standby(version, PHYSICAL_SLOT, **SYNCING) as (primary, standby):
        with database_of(primary) as shop, running(shop, destination, store(primary), failover_slot=True) as run:
            run.wait_states("ready", 1)
            shop.execute("update orders set counter = counter + 1")
            run.wait_caught_up()
            wait_synced(primary, standby, SLOT, confirmed(shop))
            run.stop()
            # Committed on the old timeline and not read yet: it comes from the new primary.
            shop.execute("update orders set counter = counter + 1 where id <= 50; delete from orders where id = 1")
            wait_replayed(primary, standby)
        primary.stop("immediate")
        promote(standby)
        with database_of(standby) as shop:
            shop.execute("insert into orders select i, 1 from generate_series(1001, 1010) i")
            with running(shop, destination, store(standby), failover_slot=True) as run:
                run.wait_caught_up()
                run.assert_equal("orders")
                shop.execute("update orders set counter = counter + 1")
                run.wait_caught_up()
                run.assert_equal("orders")
                run.stop()
            # Nothing of the old timeline counts any more: the next start knows only the new one.
            with running(shop, destination, store(standby), failover_slot=True) as run:
                shop.execute("update orders set counter = counter + 1")
                run.wait_caught_up()
                run.assert_equal("orders")
    assert destination.copies == ["orders"]
    changes = sum(batch.change_count for batch in destination.batches)
    assert changes == 100 + 51 + 10 + 109 + 109


@pytest.mark.promise("a promoted standby that lacks the slot, or what the lake has, is an error")
@pytest.mark.invariant(10)
def test_a_lake_that_is_ahead_of_a_promoted_standby_is_an_error_unless_recreate_was_chosen() -> None:
    destination = MemoryTables()
    with shop_with_standby(18, **SYNCING) as (primary, standby):
        with (
            database_of(primary) as shop,
            running(shop, destination, PostgresStore(primary.settings(), 1), failover_slot=True) as run,
        ):
            run.wait_states("ready", 1)
            run.wait_caught_up()
            wait_synced(primary, standby, SLOT, confirmed(shop))
            wait_replayed(primary, standby)
            stop_following(standby)
            shop.execute("update orders set counter = 7")
            run.wait_caught_up()
            run.stop()
        primary.stop("immediate")
        promote(standby)
        with database_of(standby) as shop:
            # So much that the new timeline is past what the old one had: the position alone says nothing then.
            shop.execute(
                "update orders set counter = 8 where id <= 10; select pg_switch_wal(); update orders set counter = 9"
            )
            assert shop.value("select pg_current_wal_flush_lsn() > %s::text::pg_lsn", [position(destination)])
            store = PostgresStore(standby.settings(), 1)
            with pytest.raises(TimelineLeft, match="changed its timeline") as caught, running(shop, destination, store):
                pass
            assert "timeline 1 to 2" in caught.value.detail
            assert "recreate" in caught.value.hint
            recreate = InvalidatedSlotBehavior.RECREATE
            with running(shop, destination, store, invalidated_slot_behavior=recreate) as run:
                run.wait_states("ready", 1)
                shop.execute("update orders set counter = counter + 1")
                run.wait_caught_up()
                run.assert_equal("orders")
    assert destination.copies == ["orders", "orders"]


def position(destination: MemoryTables) -> str:
    lsn, _ = destination.watermarks["orders"]
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


@pytest.mark.promise("a promoted standby that lacks the slot, or what the lake has, is an error")
@pytest.mark.invariant(10)
def test_a_promoted_standby_without_the_slot_is_an_error_also_when_another_session_creates_a_new_one() -> None:
    destination, store = MemoryTables(), MemoryStore()
    with shop_with_standby(18) as (primary, standby):
        with database_of(primary) as shop, running(shop, destination, store) as run:
            run.wait_states("ready", 1)
            run.stop()
        wait_replayed(primary, standby)
        primary.stop("immediate")
        promote(standby)
        with database_of(standby) as shop:
            with pytest.raises(SlotMissing, match="does not exist") as caught, running(shop, destination, store):
                pass
            assert "failover_slot" in caught.value.hint
            shop.execute("update orders set counter = 1")
            shop.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [SLOT])
            with (
                pytest.raises(TimelineLeft, match="was created after the server was promoted") as made,
                running(shop, destination, store),
            ):
                pass
            assert "failover_slot" in made.value.hint
    assert destination.copies == ["orders"]


@pytest.mark.promise("a pipeline goes on at a promoted standby that synced its slot")
@pytest.mark.invariant(10)
def test_a_run_whose_address_leads_to_the_promoted_standby_continues_without_a_restart() -> None:
    destination = MemoryTables()
    with shop_with_standby(18, PHYSICAL_SLOT, **SYNCING) as (primary, standby):
        # In the source: it moves with it.
        store = PostgresStore(primary.settings(), 1)
        with database_of(primary) as shop, running(shop, destination, store, failover_slot=True) as run:
            run.wait_states("ready", 1)
            shop.execute("update orders set counter = 1")
            run.wait_caught_up()
            wait_synced(primary, standby, SLOT, confirmed(shop))
            shop.connection.close()
            port = primary.port
            primary.stop("immediate")
            promote(standby)
            # The address stays, the server behind it changes, as with a virtual IP or a name that is moved.
            standby.stop()
            standby.port = port
            standby.restart()
            with database_of(standby) as again:
                run.database = again
                again.execute("update orders set counter = counter + 1")
                run.wait_caught_up()
                run.assert_equal("orders")
                assert again.value("select timeline from headwater.lineages") == 2
    assert destination.copies == ["orders"]


@pytest.mark.promise("failover slots where they are asked for")
def test_a_slot_that_was_made_without_failover_is_altered_when_it_is_asked_for() -> None:
    destination, store = MemoryTables(), MemoryStore()
    with PostgresServer.start() as server, database_of(server) as shop:
        shop.execute("create table orders(id int primary key, counter int); create publication shop for table orders")
        for wanted, found in ((False, False), (True, True), (False, True)):
            with running(shop, destination, store, failover_slot=wanted) as run:
                run.wait_states("ready", 1)
                assert shop.value("select failover from pg_replication_slots where slot_name = %s", [SLOT]) is found
                run.stop()


@pytest.mark.promise("failover slots where they are asked for")
@pytest.mark.versions
def test_failover_slots_on_a_server_that_knows_none_are_refused_with_a_hint() -> None:
    with PostgresServer.start(version=16) as server, database_of(server) as shop:
        shop.execute("create table orders(id int primary key); create publication shop for table orders")
        with pytest.raises(PreflightError) as caught, running(shop, failover_slot=True):
            pass
        assert "no failover slots" in caught.value.detail
        assert "failover_slot = false" in caught.value.hint


@pytest.mark.promise("a pipeline goes on at a promoted standby that synced its slot")
@pytest.mark.invariant(10)
def test_a_copy_of_a_primary_that_was_left_meanwhile_is_not_handed_over_at_the_new_one() -> None:
    """The old primary lives on, as it may for a while: its positions are ahead of the new one's, and are not the same."""
    destination, store = MemoryTables(), MemoryStore()
    copied, release = threading.Event(), threading.Event()

    def hold(rows: TableRows) -> None:
        if destination.copies[-1] == "late" and not copied.is_set():
            copied.set()
            assert release.wait(60)

    destination.after_copy = hold
    with shop_with_standby(18, **SYNCING) as (primary, standby), database_of(primary) as shop:
        hosts = replace(
            config(shop).pg_connection,
            host=f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}",
            target_session_attrs=TargetSessionAttrs.READ_WRITE,
        )
        with running(shop, destination, store, failover_slot=True, pg_connection=hosts) as run:
            run.wait_states("ready", 1)
            shop.execute("create table late(id int primary key, counter int)")
            shop.execute("alter publication shop add table late")
            assert copied.wait(30)
            wait_synced(primary, standby, SLOT, confirmed(shop))
            wait_replayed(primary, standby)
            promote(standby)
            # New sessions go to the new primary from here on; the old ones stay where they are.
            shop.execute("alter system set default_transaction_read_only = on")
            shop.execute("select pg_reload_conf()")
            shop.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", [SLOT]
            )
            run.wait_for(lambda: store.get_lineage() is not None and store.get_lineage().timeline == 2)  # type: ignore[union-attr]
            shop.execute("set default_transaction_read_only = off")
            shop.execute("insert into late select i, 0 from generate_series(1001, 3000) i")
            with database_of(standby) as new:
                new.execute("insert into late select i, 1 from generate_series(1, 10) i")
                run.database = new
                release.set()
                run.wait_states("ready", 2)
                run.wait_caught_up()
                run.assert_equal("orders", "late")
    assert destination.copies == ["orders", "late", "late"]
