"""Whatever leads to a new copy, and whichever tables are copied at first: the new copy is a whole one.

`table_sync_copy` decides about the first copy of a table alone. A table that was created empty and followed has rows that only
the stream brought; to skip the next copy as well would throw them away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from headwater.config import TableSyncCopyConfig
from headwater.config.pipeline import InvalidatedSlotBehavior, TableSyncCopyMode
from headwater.contracts.results import WriteEventsResult
from headwater.errors import DestinationError, Retry
from headwater.events import EventBatch
from headwater.schema.table import TableId
from headwater.source.slots import apply_slot_name
from headwater.states import to_be_copied
from headwater.store.postgres import PostgresStore
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import RunningIntoMemory, running

SETTINGS = {
    "include_all": TableSyncCopyConfig(),
    "skip_all": TableSyncCopyConfig(mode=TableSyncCopyMode.SKIP_ALL),
    "include_tables": TableSyncCopyConfig(mode=TableSyncCopyMode.INCLUDE_TABLES, tables=("public.items",)),
    "skip_tables": TableSyncCopyConfig(mode=TableSyncCopyMode.SKIP_TABLES, tables=("public.orders",)),
}


class FailsOnce(MemoryTables):
    """One batch's part of a table fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: TableId | None = None

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        if self.fails not in events.tables:
            super().write_events(events, result)
            return
        failed, self.fails = self.fails, None
        assert failed is not None
        super().write_events(events.without({failed}), WriteEventsResult())
        result.failed_tables({failed: DestinationError("it fails once", hint="Wait.", retry=Retry.TIMED)})


class WithoutFingerprints(PostgresStore):
    def get_table_fingerprints(self) -> Mapping[TableId, str]:
        return {}


def orders_id(shop: Database) -> TableId:
    return TableId(shop.value("select 'orders'::regclass::oid::bigint"))


def rewrite(shop: Database, destination: FailsOnce) -> None:
    shop.execute("alter table orders alter n type int using n * 10")


def add_a_column(shop: Database, destination: FailsOnce) -> None:
    shop.execute("alter table orders add c int default 3; insert into orders values (90, 9, 9)")


def leave_and_come_back(shop: Database, destination: FailsOnce) -> None:
    shop.execute("alter publication shop drop table orders; alter publication shop add table orders")


def ask_for_it(shop: Database, destination: FailsOnce) -> None:
    store = PostgresStore(shop.settings, 1)
    store.load_table_states()
    store.update_table_state(orders_id(shop), to_be_copied(store.get_table_state(orders_id(shop))))
    store.close()


def fail_in_a_batch(shop: Database, destination: FailsOnce) -> None:
    destination.fails = orders_id(shop)
    shop.execute("update orders set n = 77 where id = 4")


def lose_the_slot(shop: Database, destination: FailsOnce) -> None:
    shop.execute(f"select pg_drop_replication_slot('{apply_slot_name(1)}'); delete from items where id = 2")


def nothing(shop: Database, destination: FailsOnce) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Trigger:
    act: Callable[[Database, FailsOnce], None]
    stopped: bool = False
    """Between two runs, and not during one."""
    all_tables: bool = False
    store: type[PostgresStore] = PostgresStore
    """Of the second run."""


TRIGGERS = {
    "a look at the catalog": Trigger(rewrite),
    "a look at the catalog at start": Trigger(rewrite, stopped=True),
    "other columns in the stream": Trigger(add_a_column),
    "other columns while stopped": Trigger(add_a_column, stopped=True),
    "it left and came back": Trigger(leave_and_come_back),
    "it left and came back while stopped": Trigger(leave_and_come_back, stopped=True),
    "a person": Trigger(ask_for_it),
    "a person while stopped": Trigger(ask_for_it, stopped=True),
    "an error of the table": Trigger(fail_in_a_batch),
    "a lost slot": Trigger(lose_the_slot, stopped=True, all_tables=True),
    "no fingerprint": Trigger(nothing, stopped=True, all_tables=True, store=WithoutFingerprints),
}


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        """
        create table orders(id int primary key, n int);
        insert into orders select i, i from generate_series(1, 20) i;
        create table items(id int primary key, n int);
        insert into items select i, i from generate_series(1, 20) i;
        create publication shop for table orders, items;
        """
    )
    return database


def judged(run: RunningIntoMemory) -> None:
    """Wait until the catalog, as it is now, was judged, and every table is ready behind it."""
    now = int(run.database.value("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))
    run.database.execute("select pg_logical_emit_message(true, 'now', '')")
    run.wait_for(lambda: run.pipeline.progress.snapshot().judged >= now)
    run.wait_states("ready", 2)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", TRIGGERS)
def test_every_trigger_of_a_new_copy_makes_a_whole_one_whatever_was_copied_at_first(
    shop: Database, name: str, setting: str
) -> None:
    trigger, destination, chosen = TRIGGERS[name], FailsOnce(), SETTINGS[setting]
    settings: dict[str, Any] = {
        "table_sync_copy": chosen,
        "invalidated_slot_behavior": InvalidatedSlotBehavior.RECREATE,
    }
    with running(shop, destination, PostgresStore(shop.settings, 1), **settings) as run:
        run.wait_states("ready", 2)
        for table in ("orders", "items"):
            assert bool(destination.tables[table]) is chosen.copies(f"public.{table}")
        shop.execute("insert into orders values (50, 5); insert into items values (50, 5)")
        run.wait_caught_up()
        assert 50 in destination.tables["orders"]
        if not trigger.stopped:
            trigger.act(shop, destination)
            run.wait_for(lambda: destination.copies.count("orders") == 2)
            _compare(run, trigger, chosen)
            return
        run.stop()
    trigger.act(shop, destination)
    with running(shop, destination, trigger.store(shop.settings, 1), **settings) as run:
        run.wait_for(lambda: destination.copies.count("orders") == 2)
        _compare(run, trigger, chosen)


def _compare(run: RunningIntoMemory, trigger: Trigger, chosen: TableSyncCopyConfig) -> None:
    judged(run)
    shop = run.database
    shop.execute(
        "update orders set n = 0 where id = 7; delete from orders where id = 8; insert into items values (60, 6)"
    )
    run.wait_caught_up()
    run.assert_equal("orders")
    if trigger.all_tables or chosen.copies("public.items"):
        run.assert_equal("items")
    else:
        # Nothing led to a copy of this one.
        assert sorted(run.destination.tables["items"]) == [50, 60]
    assert run.destination.copies.count("orders") == 2
