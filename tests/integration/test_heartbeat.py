"""The heartbeat: the slot advances although nothing is written in the source, and there is no other effect (invariant 9)."""

from __future__ import annotations

import logging

import pytest

from headwater.source.preflight import run_preflight
from headwater.source.session import connect
from headwater.source.slots import apply_slot_name
from headwater.store.postgres import PostgresStore
from headwater.testing.compare import confirmed_position
from headwater.testing.postgres import PostgresServer
from tests.conftest import Database
from tests.integration.running_pipeline import running
from tests.integration.test_engine import _store_rows

SLOT = apply_slot_name(1)


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute("create table orders(id int primary key, counter int); create publication shop for all tables")
    return database


@pytest.mark.promise("a heartbeat by choice, which writes neither to the lake nor to the store")
@pytest.mark.invariant(9)
@pytest.mark.parametrize("version", [pytest.param(v, marks=pytest.mark.versions) for v in (14, 15)] + [18])
def test_the_slot_moves_with_every_beat_and_neither_lake_nor_store_are_written(version: int) -> None:
    with PostgresServer.start(version=version) as server, server.connect() as connection:
        shop = Database(server, "postgres", connection)
        shop.execute("create table orders(id int primary key, counter int); create publication shop for all tables")
        store = PostgresStore(shop.settings, 1)
        with running(shop, store=store, heartbeat_interval_ms=100) as run:
            run.wait_states("ready", 1)
            run.wait_caught_up()
            before, batches = _store_rows(shop), len(run.destination.batches)
            for _ in range(5):
                confirmed = confirmed_position(shop.connection, SLOT)
                run.wait_for(lambda confirmed=confirmed: confirmed_position(shop.connection, SLOT) > confirmed)  # type: ignore[misc]
            assert _store_rows(shop) == before
            assert len(run.destination.batches) == batches
            shop.execute("insert into orders values (1, 1)")
            run.wait_caught_up()
            run.assert_equal("orders")


@pytest.mark.promise("a heartbeat by choice, which writes neither to the lake nor to the store")
def test_without_the_setting_no_heartbeat_is_sent(shop: Database) -> None:
    with running(shop) as run:
        run.wait_states("ready", 1)
        shop.execute("insert into orders values (1, 1)")
        run.wait_caught_up()
        assert beats(shop) == 0
    with running(shop, run.destination, run.pipeline._store, heartbeat_interval_ms=100) as run:
        run.wait_for(lambda: beats(shop) > 0)


def beats(shop: Database) -> int:
    """Sessions that send a heartbeat."""
    return int(
        shop.value(
            "select count(*) from pg_stat_activity where application_name = 'headwater_heartbeat_1' and datname = %s",
            [shop.name],
        )
    )


@pytest.mark.promise("a heartbeat by choice, which writes neither to the lake nor to the store")
def test_a_heartbeat_that_fails_is_logged_and_tried_again_and_stops_nothing(
    shop: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), running(shop, heartbeat_interval_ms=100) as run:
        run.wait_states("ready", 1)
        run.wait_for(lambda: beats(shop) == 1)
        shop.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'headwater_heartbeat_1'"
        )
        run.wait_for(lambda: "heartbeat could not be sent" in caplog.text)
        run.wait_for(lambda: beats(shop) == 1)
        shop.execute("insert into orders values (1, 1)")
        run.wait_caught_up()
        run.assert_equal("orders")


@pytest.mark.promise("a heartbeat by choice, which writes neither to the lake nor to the store")
def test_a_role_that_may_not_send_a_heartbeat_is_reported_before_the_start(shop: Database) -> None:
    name = "hw_no_heart"
    shop.execute(f"create role {name} login replication; grant create on database {shop.name} to {name}")
    shop.execute("revoke execute on function pg_logical_emit_message(bool, text, text, bool) from public")
    shop.execute(f"grant select on orders to {name}")
    try:
        settings = shop.server.settings(shop.name, tcp=False, username=name)
        with connect(settings) as session:
            findings = run_preflight(session, "shop", pipeline_id=1, heartbeat=True)
        (found,) = [finding for finding in findings if "heartbeat" in finding.message]
        assert found.severity == "error"
        assert "GRANT EXECUTE" in found.hint
    finally:
        shop.execute(f"drop owned by {name}; drop role {name}")
