"""A pipeline with a store of the user's own: what it asks of it and of the source, and that the lock is free afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from headwater.contracts.stores import PipelineStore, SchemaStore, StateStore, TableStateLifecycleStore
from headwater.engine.pipeline import Pipeline
from headwater.errors import PreflightError
from headwater.secret import Secret
from headwater.source.lock import PipelineLock
from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import config, running

LIFECYCLE = ("interrupt_with", "start", "close")
OF_MEMORY = {
    name: value for name, value in vars(MemoryStore).items() if name not in ("__dict__", "__weakref__", *LIFECYCLE)
}
THREE_CONTRACTS = (SchemaStore, StateStore, TableStateLifecycleStore)


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "create table orders(id int primary key, counter int not null); insert into orders values (1, 1), (2, 1);"
        "create publication shop for table orders"
    )
    return database


@pytest.fixture
def reader(shop: Database) -> Iterator[Database]:
    """The same database by a role that may read and replicate, and create nothing."""
    name = f"reader_{shop.name}"
    shop.execute(f"create role {name} login replication password 'word'; grant select on orders to {name}")
    try:
        with shop.server.connect(shop.name) as connection:
            yield Database(shop.server, shop.name, connection)
    finally:
        shop.execute(f"drop owned by {name}; drop role {name}")


def by_reader(shop: Database) -> Any:
    base = config(shop)
    return replace(base.pg_connection, username=f"reader_{shop.name}", password=Secret("word"))


def test_a_store_outside_the_source_needs_no_right_to_create_anything_in_it(shop: Database, reader: Database) -> None:
    with running(shop, pg_connection=by_reader(shop)) as run:
        run.wait_states("ready", 1)
        shop.execute("update orders set counter = 2")
        run.wait_caught_up()
        run.assert_equal("orders")


def test_a_store_in_the_source_does(shop: Database, reader: Database) -> None:
    connection = by_reader(shop)
    store = PostgresStore(connection.connect_settings(), 1)
    pipeline = Pipeline(config(shop, pg_connection=connection), store, MemoryTables())
    with pytest.raises(PreflightError, match="not ready") as caught:
        pipeline.start()
    assert "lacks CREATE on database" in caught.value.detail


def test_a_store_made_of_the_three_contracts_alone_is_enough(shop: Database) -> None:
    store = cast(PipelineStore, type("Own", THREE_CONTRACTS, dict(OF_MEMORY))())
    with running(shop, store=store) as run:
        run.wait_states("ready", 1)
        run.wait_caught_up()
        run.assert_equal("orders")
        run.stop()


@pytest.mark.parametrize("lacks", LIFECYCLE)
def test_the_lock_is_released_whatever_the_store_is_like(shop: Database, lacks: str) -> None:
    def broken(self: object, *_: object) -> None:
        raise AttributeError(lacks)

    pipeline = Pipeline(config(shop), type("Broken", (MemoryStore,), {lacks: broken})(), MemoryTables())
    try:
        pipeline.start()
    except AttributeError:
        assert lacks != "close"
    pipeline.shutdown()
    assert lacks != "close" or pipeline.wait(30)
    lock = PipelineLock(shop.settings, 1)
    lock.acquire(wait_seconds=0.0)
    lock.release()
