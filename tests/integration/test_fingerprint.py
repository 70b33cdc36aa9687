"""What is recorded of each table's catalog entry: when it is taken, and what a run without one does."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from headwater.config import TableSyncCopyConfig
from headwater.config.pipeline import TableSyncCopyMode
from headwater.errors import DestinationUnavailable
from headwater.schema.table import TableId
from headwater.source.preflight import run_preflight
from headwater.source.session import connect
from headwater.states import INIT
from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import RunningIntoMemory, running


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        """
        create table orders(id int primary key, note text);
        insert into orders select i, 'n' from generate_series(1, 20) i;
        create table m(id int, at int, primary key (id, at)) partition by range (at);
        create table m1 partition of m for values from (0) to (10);
        create table m2 partition of m for values from (10) to (20);
        insert into m select i, i % 20 from generate_series(1, 40) i;
        create publication shop for table orders, m with (publish_via_partition_root = true);
        """
    )
    return database


def judge(run: RunningIntoMemory) -> None:
    """Wait until the catalog, as it is now, was judged."""
    now = int(run.database.value("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))
    run.database.execute("select pg_logical_emit_message(true, 'now', '')")
    run.wait_for(lambda: run.pipeline.progress.snapshot().judged >= now)


class Forgetful(MemoryStore):
    """As a store of a user's own that was written for the contract of before."""

    def get_table_fingerprints(self) -> Mapping[TableId, str]:
        return {}


@pytest.mark.invariant(17)
def test_a_state_without_a_fingerprint_is_in_doubt_once_and_a_store_that_keeps_none_at_each_start(
    shop: Database, caplog: pytest.LogCaptureFixture
) -> None:
    for store, later in ((PostgresStore(shop.settings, 1), 0), (Forgetful(), 2)):
        destination = MemoryTables()
        for start, copies in enumerate((2, 2, later)):
            if start == 1 and isinstance(store, PostgresStore):
                shop.execute("truncate headwater.table_fingerprints")
            caplog.clear()
            before = len(destination.copies)
            with caplog.at_level(logging.WARNING), running(shop, destination, store) as run:
                run.wait_states("ready", 2)
                judge(run)
                run.wait_states("ready", 2)
                run.stop()
            assert len(destination.copies) == before + copies, start
            assert caplog.text.count("no fingerprint of it is on record") == (copies if start else 0)
        if isinstance(store, PostgresStore):
            store.remove()
            store.close()
            shop.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")


@pytest.mark.invariant(17)
def test_a_nightly_reload_through_the_root_is_explained_by_the_stream_also_right_before_a_stop(shop: Database) -> None:
    destination = MemoryTables()
    reload = "begin; truncate m; insert into m select i, i % 20 from generate_series(100, 140) i; commit"
    with running(shop, destination, PostgresStore(shop.settings, 1)) as run:
        run.wait_states("ready", 2)
        shop.execute(reload)
        judge(run)
        shop.execute(reload)
        run.wait_caught_up()
        run.stop()
    shop.execute(reload)
    with running(shop, destination, PostgresStore(shop.settings, 1)) as run:
        run.wait_states("ready", 2)
        judge(run)
        run.wait_caught_up()
        run.assert_equal("m", "orders")
    assert sorted(destination.copies) == ["m", "orders"]


@pytest.mark.invariant(17)
@pytest.mark.parametrize(
    "publication",
    ["for table m, orders", "for all tables"],
    ids=["alone", "beside what it becomes"],
)
@pytest.mark.parametrize("goes", ["drop table m3", "alter table m detach partition m3"])
def test_a_partition_that_is_made_filled_and_goes_between_two_looks_leaves_no_rows_behind(
    shop: Database, caplog: pytest.LogCaptureFixture, goes: str, publication: str
) -> None:
    shop.execute(
        # Types of one's own are told between the root and the partition.
        "create type mood as enum ('sad'); alter table m add mood mood; drop publication shop;"
        f"create publication shop {publication} with (publish_via_partition_root = true)"
    )
    detached = 1 if "detach" in goes and "all" in publication else 0
    with running(shop) as run:
        run.wait_states("ready", 2)
        with shop.connect() as session, session.transaction():
            session.execute("create table m3 partition of m for values from (20) to (30)")
            session.execute("insert into m values (900, 25)")
        shop.execute(goes)
        judge(run)
        run.wait_states("ready", 2 + detached)
        run.wait_caught_up()
        run.assert_equal("m", *(["m3"] if detached else []))
    assert "table public.m is copied again" in caplog.text


@pytest.mark.invariant(17)
def test_a_partition_that_had_changes_and_went_before_a_stop_is_on_record(shop: Database) -> None:
    destination, store = MemoryTables(), PostgresStore(shop.settings, 1)
    with running(shop, destination, store) as run:
        run.wait_states("ready", 2)
        judge(run)
        run.pipeline._watch = lambda: None  # type: ignore[method-assign]
        shop.execute("create table m3 partition of m for values from (20) to (30)")
        shop.execute("insert into m values (900, 25)")
        run.wait_caught_up()
        shop.execute("drop table m3")
    with running(shop, destination, PostgresStore(shop.settings, 1)) as run:
        run.wait_for(lambda: destination.copies.count("m") == 2)
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("m", "orders")


@pytest.mark.invariant(17)
def test_a_root_with_an_unlogged_leaf_is_an_error_of_that_table_and_comes_back_by_rollback(shop: Database) -> None:
    with running(shop, store=PostgresStore(shop.settings, 1)) as run:
        run.wait_states("ready", 2)
        shop.execute("alter table m1 set unlogged")
        run.wait_for(lambda: run.states()["public.m"] == "errored")
        shop.execute("update orders set note = 'x' where id = 3")
        run.wait_caught_up()
        run.assert_equal("orders")
        with connect(shop.settings) as connection:
            findings = run_preflight(connection, "shop", pipeline_id=1)
        assert any("m1" in finding.detail and "sends no changes" in finding.detail for finding in findings)


@pytest.mark.invariant(17)
def test_a_root_that_is_truncated_together_with_other_tables_is_not_copied_again(shop: Database) -> None:
    """The stream tells of them in the same way as of a root and its partition."""
    destination = MemoryTables()
    with running(shop, destination) as run:
        run.wait_states("ready", 2)
        judge(run)
        shop.execute("truncate m, orders; insert into m values (1, 1); insert into orders values (1)")
        judge(run)
        run.wait_caught_up()
        run.assert_equal("m", "orders")
    assert sorted(destination.copies) == ["m", "orders"]


def test_skipping_holds_for_the_first_copy_only_whatever_leads_to_the_next(shop: Database) -> None:
    destination, store = MemoryTables(), PostgresStore(shop.settings, 1)
    skip = TableSyncCopyConfig(mode=TableSyncCopyMode.SKIP_ALL)
    orders = TableId(shop.value("select 'orders'::regclass::oid::bigint"))
    with running(shop, destination, store, table_sync_copy=skip) as run:
        run.wait_states("ready", 2)
        assert destination.tables["orders"] == destination.tables["m"] == {}
        shop.execute("alter table orders add c int")
        judge(run)
        run.wait_states("ready", 2)
        run.assert_equal("orders")
        outside = PostgresStore(shop.settings, 1)
        outside.load_table_states()
        outside.update_table_state(orders, INIT)
        outside.close()
        run.wait_for(lambda: destination.copies.count("orders") == 3)
        run.wait_states("ready", 2)
        run.assert_equal("orders")
        assert destination.tables["m"] == {}


@pytest.mark.versions(17, 18)
def test_what_will_not_be_in_the_lake_and_leaves_without_a_common_identity_are_reported_at_start(
    database: Database, pg_version: int
) -> None:
    database.execute(
        """
        create table made(id int primary key, twice int generated always as (id * 2) stored);
        create table m(id int, at int) partition by range (at);
        create table m1(id int primary key, at int); create table m2(id int, at int primary key);
        alter table m attach partition m1 for values from (0) to (10);
        alter table m attach partition m2 for values from (10) to (20);
        create publication roots for table made, m with (publish_via_partition_root = true);
        create publication leaves for table m;
        """
    )
    with connect(database.settings) as session:
        roots = "\n".join(map(str, run_preflight(session, "roots", pipeline_id=1)))
        leaves = "\n".join(map(str, run_preflight(session, "leaves", pipeline_id=1)))
    assert "1 generated column will not be in the lake" in roots
    assert "public.made.twice" in roots
    assert ("publish_generated_columns" in roots) == (pg_version >= 18)
    assert "the partitions of public.m have no replica identity in common" in roots
    assert "without a usable replica identity" not in roots
    assert "1 partitioned table will be one lake table for each partition" in leaves


def test_the_log_says_who_asked_for_a_new_copy(shop: Database, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    with caplog.at_level(logging.INFO, logger="headwater"), running(shop, store=store) as run:
        run.wait_states("ready", 2)
        shop.execute("vacuum full orders")
        shop.execute("alter table orders alter column note type varchar(40)")
        run.wait_for(lambda: "table public.orders: ready -> init, by the look at the catalog" in caplog.text)
        run.wait_for(lambda: run.destination.copies.count("orders") == 2)
        run.wait_states("ready", 2)
        caplog.clear()
        store.update_table_state(TableId(shop.value("select 'm'::regclass::oid::bigint")), INIT)
        run.wait_for(lambda: "table public.m: ready -> init, by the user" in caplog.text)
        run.wait_for(lambda: run.destination.copies.count("m") == 2)
        assert "init -> data_sync, by the table sync worker" in caplog.text


def test_a_table_sync_worker_that_starts_again_says_so_itself(shop: Database, caplog: pytest.LogCaptureFixture) -> None:
    destination, failed = MemoryTables(), list[bool]()

    def fail_once(_: object) -> None:
        if not failed:
            failed.append(True)
            raise DestinationUnavailable("the lake is unreachable", hint="It is tried again.")

    destination.before_copy = fail_once
    with caplog.at_level(logging.INFO, logger="headwater"), running(shop, destination) as run:
        run.wait_states("ready", 2)
    assert "data_sync -> init, by the table sync worker" in caplog.text
    assert "by the pipeline" not in caplog.text
