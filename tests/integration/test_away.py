"""Source, store or lake are unreachable for a while: no table is marked failed, and afterwards all is equal (invariant 15)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.engine.follow import slot_stream
from headwater.engine.follow.slot_stream import SlotStream
from headwater.errors import HeadwaterError, Retry, ServerError
from headwater.source.slots import apply_slot_name
from headwater.store.postgres import PostgresStore
from headwater.testing.compare import confirmed_position, wait_until
from headwater.testing.lake_rows import open_lake
from headwater.testing.postgres import PostgresServer
from headwater.wire.chunks import Chunk
from headwater.wire.connection import WireConnection
from tests.commands import headwater
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import running
from tests.pipeline_process import PipelineProcess, pipeline_process

SHOP = """
    create table orders(id int primary key, counter int not null);
    insert into orders select i, 1 from generate_series(1, 1000) i;
    create table items(id int primary key, counter int not null);
    insert into items select i, 1 from generate_series(1, 10) i;
    create publication shop for table orders, items;
"""


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(SHOP)
    return database


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """One that a test may stop."""
    with PostgresServer.start() as server:
        yield server


@pytest.mark.invariant(15)
def test_changes_go_on_after_the_server_crashed_and_recovered(
    own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server.connect() as connection:
        connection.execute(SHOP)
    with own_server.connect() as connection, running(Database(own_server, "postgres", connection)) as run:
        run.wait_states("ready", 2)
        run.database.execute("update orders set counter = 2")
        with caplog.at_level(logging.WARNING):
            # At once, as a crash: the server has to recover before it accepts connections.
            own_server.stop("immediate")
            run.wait_for(lambda: "following the slot failed" in caplog.text)
            own_server.restart()
        with own_server.connect() as again:
            run.database = Database(own_server, "postgres", again)
            run.database.execute("update orders set counter = 3 where id % 2 = 0; delete from items where id = 1")
            run.wait_caught_up()
            run.assert_equal("orders", "items")
        assert set(run.states().values()) == {"ready"}


@pytest.mark.security
@pytest.mark.invariant(8)
@pytest.mark.parametrize("stage", ["apply", "copy"])
def test_a_server_that_is_stopped_the_fast_way_stops_whatever_the_lake_is_at(
    own_server: PostgresServer, stage: str
) -> None:
    """It ends ordinary sessions and waits for what followers of slots confirm. Nothing can be without lock and store."""
    with own_server.connect() as connection:
        connection.execute(SHOP)
        database, destination = Database(own_server, "postgres", connection), MemoryTables()
        written, go_on = threading.Event(), threading.Event()

        def hold(_: object) -> None:
            written.set()
            assert go_on.wait(120)

        if stage == "copy":
            destination.after_copy = hold
        store = PostgresStore(own_server.settings(), 1)
        try:
            with running(database, destination, store=store) as run:
                if stage == "apply":
                    run.wait_states("ready", 2)
                    run.wait_caught_up()
                    destination.before_events = hold
                    connection.execute("update orders set counter = 2")
                assert written.wait(60)
                own_server.restart(mode="fast")
                go_on.set()
                with own_server.connect() as again:
                    run.database = Database(own_server, "postgres", again)
                    run.wait_states("ready", 2)
                    run.wait_caught_up()
                    run.assert_equal("orders", "items")
        finally:
            go_on.set()


@pytest.mark.promise(
    "an internal error of the server is tried a few times, and one that stays ends the run with a hint"
)
def test_a_temporary_internal_error_of_the_server_is_retried(
    shop: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(SlotStream):
        left = 2

        def __init__(self, connection: WireConnection, slot: str, *rest: Any) -> None:
            super().__init__(connection, slot, *rest)
            self._fails = slot == apply_slot_name(1)

        def take(self) -> list[Chunk]:
            if self._fails and Failing.left:
                Failing.left -= 1
                raise ServerError("cache lookup failed", sqlstate="XX000", retry=Retry.NEVER)
            return super().take()

    monkeypatch.setattr(slot_stream, "SlotStream", Failing)
    with caplog.at_level(logging.WARNING), running(shop) as run:
        run.wait_states("ready", 2)
        shop.execute("update orders set counter = 2")
        run.wait_caught_up()
        run.assert_equal("orders", "items")
    assert caplog.text.count("cache lookup failed") == 2


@pytest.mark.promise(
    "an internal error of the server is tried a few times, and one that stays ends the run with a hint"
)
@pytest.mark.parametrize(
    ("row_filter", "sqlstate", "attempts"),
    [("to_tsvector(n::oid::regconfig, 'a') is not null", "XX000", 5), ("100 / n > 0", "22012", 0)],
)
def test_a_row_filter_that_fails_in_the_server_ends_the_run_with_a_hint(
    shop: Database, caplog: pytest.LogCaptureFixture, row_filter: str, sqlstate: str, attempts: int
) -> None:
    """An internal error might pass with a new session; this one does not."""
    shop.execute("create table filtered(id int primary key, n int)")
    shop.execute("alter table filtered replica identity full")
    shop.execute(f"alter publication shop add table filtered where ({row_filter})")
    with caplog.at_level(logging.WARNING), running(shop) as run:
        run.wait_states("ready", 3)
        shop.execute("insert into filtered values (1, 0)")
        with pytest.raises(ServerError) as failure:
            assert run.pipeline.wait(60)
    assert failure.value.sqlstate == sqlstate
    assert "row filter of the publication" in failure.value.hint
    assert caplog.text.count("following the slot failed") == attempts


@pytest.mark.invariant(15)
def test_an_unreachable_store_is_waited_for_and_no_table_is_marked_failed(
    shop: Database, own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = PostgresStore(own_server.settings(), 1)
    with running(shop, store=store) as run:
        run.wait_states("ready", 2)
        batches = len(run.destination.batches)
        own_server.stop()
        with caplog.at_level(logging.WARNING):
            shop.execute("update orders set counter = 2")
            run.wait_for(lambda: "recording progress failed" in caplog.text)
            # Written, but not recorded: so it is not confirmed either.
            assert len(run.destination.batches) == batches + 1
            before = confirmed_position(shop.connection, apply_slot_name(1))
            shop.execute("update orders set counter = 3")
            assert confirmed_position(shop.connection, apply_slot_name(1)) == before
        own_server.restart()
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert set(run.states().values()) == {"ready"}


@pytest.mark.invariant(15)
def test_an_unreachable_lake_is_waited_for_and_no_table_is_marked_failed(shop: Database, tmp_path: Path) -> None:
    with pipeline_process(shop, tmp_path) as run:
        run.start()
        run.wait_ready(2)
        away = run.warehouse.with_name("away")
        run.warehouse.rename(away)
        # A file in its place, so that nothing can be created again where the lake was.
        run.warehouse.touch()
        shop.execute("update orders set counter = 2")
        wait_until(
            lambda: "writing a batch failed, retrying" in run.output,
            120,
            what="a word about the lake",
            still_good=run.still_running,
        )
        run.warehouse.unlink()
        away.rename(run.warehouse)
        shop.execute("delete from orders where id <= 10")
        run.wait_caught_up()
        assert run.states() == ["ready", "ready"]
        assert run.stop() == 0, run.output
        run.assert_equal("orders", "items")


@pytest.mark.invariant(19)
def test_readers_see_the_old_rows_until_the_new_copy_of_a_resync_is_there_and_other_tables_go_on(
    shop: Database, tmp_path: Path
) -> None:
    with pipeline_process(shop, tmp_path) as run:
        run.start()
        run.wait_ready(2)
        run.wait_caught_up()
        epoch, items = _epoch(run, "orders"), _epoch(run, "items")
        counts: list[int] = []

        def copied_again() -> bool:
            counts.append(open_lake(run.warehouse).load_table("public.orders").scan().count())
            return _epoch(run, "orders") != epoch

        headwater("resync", run.settings_file, "public.orders")
        shop.execute("update items set counter = 2")
        wait_until(copied_again, 120, what="the new copy", still_good=run.still_running, interval=0.01)
        run.wait_ready(2)
        run.wait_caught_up()
        assert set(counts) == {1000}, "a reader saw another table than the old one or the new one"
        assert _epoch(run, "items") == items
        assert run.stop() == 0, run.output
        run.assert_equal("orders", "items")


def _epoch(run: PipelineProcess, table: str) -> str:
    """Which copy the lake table's rows come from."""
    loaded = open_lake(run.warehouse).load_table(f"public.{table}")
    for snapshot in sorted(loaded.snapshots(), key=lambda snapshot: snapshot.sequence_number or 0, reverse=True):
        properties = snapshot.summary.additional_properties if snapshot.summary is not None else {}
        if "headwater.epoch" in properties:
            return properties["headwater.epoch"]
    raise HeadwaterError(f"{table} has no copy")
