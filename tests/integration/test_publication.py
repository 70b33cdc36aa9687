"""The publication changes around a pipeline, running or stopped: what joins, what leaves, and what comes back."""

from __future__ import annotations

import random
import threading
import time

import pytest

from headwater.events import EventBatch, TableRows
from headwater.schema.table import TableId
from headwater.states import INIT
from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from headwater.testing.compare import wait_until
from tests.background_writes import writing
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import RunningIntoMemory, running


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        """
        create table orders(id int primary key, note text);
        insert into orders select i, 'n' from generate_series(1, 100) i;
        create table items(id int primary key, note text);
        insert into items select i, 'i' from generate_series(1, 100) i;
        create publication shop for table orders, items;
        """
    )
    return database


def oid(database: Database, table: str) -> TableId:
    return TableId(database.value("select %s::regclass::oid::bigint", [table]))


def sync_slots(database: Database) -> int:
    return int(
        database.value("select count(*) from pg_replication_slots where starts_with(slot_name, 'headwater_sync_')")
    )


def wait_ready(run: RunningIntoMemory, *tables: str) -> None:
    """Exactly these tables, all ready."""
    run.wait_for(lambda: run.states() == {f"public.{table}": "ready" for table in tables})


def wait_copies(run: RunningIntoMemory, table: str, count: int) -> None:
    run.wait_for(lambda: run.destination.copies.count(table) == count)


@pytest.mark.promise("tables added and removed while running")
@pytest.mark.versions
def test_a_table_that_joins_while_running_is_copied_and_followed(shop: Database) -> None:
    with running(shop) as run:
        wait_ready(run, "items", "orders")
        shop.execute("create table late(id int primary key, note text); insert into late values (1, 'a'), (2, 'b')")
        shop.execute("alter publication shop add table late")
        wait_ready(run, "items", "late", "orders")
        shop.execute(
            "update late set note = 'c' where id = 1; insert into late values (3, 'd'); delete from late where id = 2"
        )
        shop.execute("update orders set note = 'x' where id < 10")
        run.wait_caught_up()
        run.assert_equal("orders", "items", "late")
        assert sorted(run.destination.copies) == ["items", "late", "orders"]


@pytest.mark.promise("tables added and removed while running")
def test_a_table_that_leaves_while_running_is_forgotten_and_its_lake_table_kept(shop: Database) -> None:
    store = PostgresStore(shop.settings, 1)
    with running(shop, store=store) as run:
        wait_ready(run, "items", "orders")
        before = dict(run.destination.tables["items"])
        shop.execute("alter publication shop drop table items")
        wait_ready(run, "orders")
        shop.execute("update items set note = 'unseen'; update orders set note = 'seen'")
        run.wait_caught_up()
        left = oid(shop, "items")

        def purged() -> bool:
            kept = ("table_states", "table_schemas", "destination_tables")
            rows = sum(shop.value(f"select count(*) from headwater.{t} where table_id = %s", [left]) for t in kept)
            worker = "select count(*) from headwater.replication_progress where worker = %s"
            return bool(rows + shop.value(worker, [f"table_sync:{left}"]) == 0)

        run.wait_for(purged)
        run.wait_for(lambda: sync_slots(shop) == 0)
        assert run.destination.tables["items"] == before
        run.assert_equal("orders")


def test_a_table_that_leaves_during_its_copy_takes_worker_slot_and_state_with_it(shop: Database) -> None:
    destination, store, begun, release = MemoryTables(), MemoryStore(), threading.Event(), threading.Event()

    def block(rows: TableRows) -> None:
        begun.set()
        assert release.wait(30)

    destination.during_copy = block
    shop.execute("alter publication shop drop table orders")
    with running(shop, destination, store) as run:
        assert begun.wait(30)
        shop.execute("alter publication shop drop table items")
        run.wait_for(lambda: run.states() == {})
        release.set()
        run.wait_for(lambda: not store.get_table_states() and sync_slots(shop) == 0)
        shop.execute("alter publication shop add table items")
        wait_ready(run, "items")
        run.assert_equal("items")


def test_nothing_of_a_table_is_removed_or_copied_while_a_batch_with_its_changes_is_written(shop: Database) -> None:
    """A destination records the watermark with the batch: purged before that, the table's metadata would come back."""
    store, begun, release = MemoryStore(), threading.Event(), threading.Event()

    def block(batch: EventBatch) -> None:
        begun.set()
        assert release.wait(30)

    with running(shop, store=store) as run:
        wait_ready(run, "items", "orders")
        run.destination.before_events = block
        shop.execute("begin; update items set note = 'u'; update orders set note = 'u'; commit")
        assert begun.wait(30)
        shop.execute("alter publication shop drop table items")
        store.update_table_state(oid(shop, "orders"), INIT)
        run.wait_for(lambda: run.states() == {"public.orders": "init"})
        time.sleep(0.7)  # time enough to purge and to copy, if nobody waited
        assert oid(shop, "items") in store.get_table_states()
        assert run.destination.copies.count("orders") == 1
        release.set()
        run.wait_for(lambda: oid(shop, "items") not in store.get_table_states())
        wait_ready(run, "orders")
        run.wait_caught_up()
        run.assert_equal("orders")
        assert run.destination.copies.count("orders") == 2


def test_a_table_that_left_and_came_back_between_two_looks_is_copied_again(shop: Database) -> None:
    with running(shop) as run:
        wait_ready(run, "items", "orders")
        with shop.connect() as session:
            session.execute("alter publication shop drop table items")
            session.execute("update items set note = 'in the gap' where id <= 10")
            session.execute("delete from items where id > 90")
            session.execute("alter publication shop add table items")
        wait_copies(run, "items", 2)
        wait_ready(run, "items", "orders")
        run.wait_caught_up()
        run.assert_equal("items", "orders")
        assert run.destination.copies.count("orders") == 1


@pytest.mark.promise("tables added and removed while stopped")
def test_tables_that_joined_left_or_came_back_while_stopped_are_seen_at_the_start(shop: Database) -> None:
    destination = MemoryTables()
    shop.execute("create table gone(id int primary key); alter publication shop add table gone")
    with running(shop, destination, PostgresStore(shop.settings, 1)) as run:
        wait_ready(run, "gone", "items", "orders")
        run.stop()
    shop.execute("alter publication shop drop table gone, items")
    shop.execute("update items set note = 'in the gap'; update orders set note = 'as ever'")
    shop.execute("alter publication shop add table items")
    shop.execute(
        "create table late(id int primary key); insert into late values (1); alter publication shop add table late"
    )
    with running(shop, destination, PostgresStore(shop.settings, 1)) as run:
        wait_ready(run, "items", "late", "orders")
        run.wait_caught_up()
        run.assert_equal("items", "late", "orders")
        assert "gone" in destination.tables
        assert shop.value("select count(*) from headwater.table_states") == 3
    assert (destination.copies.count("items"), destination.copies.count("orders")) == (2, 1)


@pytest.mark.promise("FOR ALL TABLES")
def test_for_all_tables_takes_in_what_is_made_and_lets_go_of_what_is_dropped(shop: Database) -> None:
    shop.execute("drop publication shop; create publication shop for all tables")
    with running(shop, store=PostgresStore(shop.settings, 1)) as run:
        wait_ready(run, "items", "orders")
        shop.execute("create table late(id int primary key); insert into late values (1)")
        wait_ready(run, "items", "late", "orders")
        shop.execute("insert into late values (2); drop table items")
        wait_ready(run, "late", "orders")
        run.wait_caught_up()
        run.assert_equal("late", "orders")
        shop.execute("create table items(id int primary key, note text); insert into items values (7, 'new')")
        wait_ready(run, "items", "late", "orders")
        run.assert_equal("items")
        assert shop.value("select count(*) from headwater.table_states") == 3


def test_a_primary_key_that_changes_under_identity_full_leads_to_a_new_copy(database: Database) -> None:
    """The stream describes the table with the same bytes before and after."""
    database.execute(
        """
        create table prices(code text not null, id int primary key, amount int);
        alter table prices replica identity full;
        insert into prices values ('a', 1, 1), ('b', 2, 2);
        create publication shop for table prices
        """
    )
    with running(database) as run:
        run.wait_states("ready", 1)
        database.execute("alter table prices drop constraint prices_pkey, add primary key (code)")
        database.execute("insert into prices values ('c', 1, 3), ('d', 1, 4)")
        run.wait_for(lambda: run.destination.copies.count("prices") == 2)
        run.wait_states("ready", 1)
        database.execute("delete from prices where code = 'c'")
        run.wait_caught_up()
        run.assert_equal("prices")


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
@pytest.mark.promise("TABLES IN SCHEMA")
@pytest.mark.versions
def test_tables_in_schema_follow_the_schema(shop: Database) -> None:
    shop.execute("create schema depot; create table depot.shelves(id int primary key)")
    shop.execute("drop publication shop; create publication shop for tables in schema depot")
    with running(shop) as run:
        run.wait_for(lambda: run.states() == {"depot.shelves": "ready"})
        shop.execute("create table depot.boxes(id int primary key); insert into depot.boxes values (1)")
        run.wait_for(lambda: run.states() == {"depot.shelves": "ready", "depot.boxes": "ready"})
        shop.execute("alter table depot.shelves set schema public; alter publication shop add tables in schema public")
        run.wait_for(lambda: set(run.states().values()) == {"ready"} and len(run.states()) == 4)
        shop.execute("insert into shelves values (5)")
        run.wait_caught_up()
        run.wait_for(lambda: run.destination.tables["shelves"] == {5: (5,)})
        assert "public.shelves" in run.states()


def test_a_table_that_another_session_has_for_itself_holds_neither_the_look_nor_a_stop_up(shop: Database) -> None:
    """The server opens every table to say what a publication has."""
    with running(shop) as run, shop.connect() as other:
        wait_ready(run, "items", "orders")
        with other.transaction():
            other.execute("lock table items in access exclusive mode")
            # Somebody asks for something that only a new look can see, so that one is under way.
            shop.execute("create table late(id int primary key)")
            shop.execute("alter publication shop add table late")
            waits = "select count(*) from pg_locks where relation = 'items'::regclass and not granted"
            run.wait_for(lambda: shop.value(waits) > 0)
            run.stop()


@pytest.mark.promise("row filters and column lists are honoured in copy and stream")
@pytest.mark.versions
def test_row_filter_and_column_list_hold_in_copy_and_stream_and_when_they_change(shop: Database) -> None:
    shop.execute("alter publication shop set table orders where (id <= 50), items (id)")
    with running(shop) as run:
        wait_ready(run, "items", "orders")
        shop.execute("insert into orders values (0, 'in'), (1000, 'out'); insert into items values (1000, 'hidden')")
        run.wait_caught_up()
        filtered = "select id, note from orders where id <= 50"
        assert run.destination.tables["orders"] == {row[0]: row for row in shop.execute(filtered)}
        assert run.destination.tables["items"] == {row[0]: row for row in shop.execute("select id from items")}
        shop.execute("alter publication shop set table orders where (id > 50), items (id)")
        wait_copies(run, "orders", 2)
        wait_ready(run, "items", "orders")
        assert min(run.destination.tables["orders"]) == 51
        shop.execute("alter publication shop set table orders, items (id, note)")
        wait_copies(run, "items", 2)
        wait_copies(run, "orders", 3)
        wait_ready(run, "items", "orders")
        shop.execute("update items set note = 'shown' where id < 5; update orders set note = 'all' where id < 5")
        run.wait_caught_up()
        run.assert_equal("items", "orders")


def test_an_operation_that_is_published_again_leads_to_a_new_copy(shop: Database) -> None:
    shop.execute("alter publication shop set (publish = 'insert, update')")
    with running(shop) as run:
        wait_ready(run, "items", "orders")
        shop.execute("delete from orders where id > 50")
        run.wait_caught_up()
        assert len(run.destination.tables["orders"]) == 100
        shop.execute("alter publication shop set (publish = 'insert, update, delete, truncate')")
        wait_copies(run, "orders", 2)
        wait_ready(run, "items", "orders")
        run.assert_equal("items", "orders")


PARTITIONED = """
create table m(id int, at int, note text, primary key (id, at)) partition by range (at);
create table m1 partition of m for values from (0) to (10);
create table m2 partition of m for values from (10) to (20) partition by range (id);
create table m2a partition of m2 for values from (0) to (1000);
insert into m select i, i % 20, 'n' from generate_series(1, 100) i;
create publication shop for table m with (publish_via_partition_root = {via_root});
"""


@pytest.mark.promise(
    "partitioned roots, nested partitions and single leaves, with and without publish_via_partition_root"
)
@pytest.mark.versions
def test_a_partitioned_root_needs_nothing_for_a_new_partition(database: Database) -> None:
    database.execute(PARTITIONED.format(via_root="true"))
    with running(database) as run:
        wait_ready(run, "m")
        database.execute("create table m3 partition of m for values from (20) to (30)")
        database.execute("create table m2b partition of m2 for values from (1000) to (2000)")
        database.execute(
            "insert into m values (500, 25, 'new'), (1500, 15, 'nested'); update m set note = 'u' where id < 5"
        )
        run.wait_caught_up()
        run.assert_equal("m")
        assert run.destination.copies == ["m"]


@pytest.mark.parametrize(
    "statement",
    [
        "alter table m attach partition full_one for values from (20) to (30)",
        "alter table m detach partition m1",
        "drop table m2a",
    ],
)
def test_a_root_whose_rows_change_without_a_change_in_the_stream_is_copied_again(
    database: Database, statement: str
) -> None:
    database.execute(PARTITIONED.format(via_root="true"))
    database.execute("create table full_one(id int, at int, note text, primary key (id, at))")
    database.execute("insert into full_one values (900, 25, 'with rows')")
    with running(database) as run:
        wait_ready(run, "m")
        run.assert_equal("m")
        database.execute(statement)
        wait_copies(run, "m", 2)
        wait_ready(run, "m")
        run.assert_equal("m")


@pytest.mark.promise(
    "partitioned roots, nested partitions and single leaves, with and without publish_via_partition_root"
)
@pytest.mark.versions
def test_leaves_of_a_published_parent_join_and_leave_by_themselves(database: Database) -> None:
    database.execute(PARTITIONED.format(via_root="false"))
    with running(database) as run:
        wait_ready(run, "m1", "m2a")
        database.execute(
            "create table m3 partition of m for values from (20) to (30); insert into m values (500, 25, 'x')"
        )
        wait_ready(run, "m1", "m2a", "m3")
        database.execute("alter table m detach partition m1")
        wait_ready(run, "m2a", "m3")
        database.execute("update m1 set note = 'unseen'")
        database.execute("alter table m attach partition m1 for values from (0) to (10)")
        wait_ready(run, "m1", "m2a", "m3")
        database.execute("update m set note = 'seen' where id < 20")
        run.wait_caught_up()
        run.assert_equal("m1", "m2a", "m3")
        # Away and back between two looks.
        with database.connect() as session:
            session.execute("alter table m detach partition m3")
            session.execute("insert into m3 values (501, 26, 'in the gap')")
            session.execute("alter table m attach partition m3 for values from (20) to (30)")
        wait_until(lambda: 501 in run.destination.tables["m3"], 30, what="the change in the gap")
        wait_ready(run, "m1", "m2a", "m3")
        run.assert_equal("m1", "m2a", "m3")


def test_tables_that_leave_come_back_and_are_copied_again_under_load_end_equal(database: Database) -> None:
    for table in ("orders", "items"):
        database.execute(f"create table {table}(id int primary key, counter int not null, note text)")
        database.execute(f"insert into {table} select i, 1, 'n' from generate_series(1, 5000) i")
    database.execute("create publication shop for table orders, items")
    store = PostgresStore(database.settings, 1)
    outside = PostgresStore(database.settings, 1)
    with running(database, store=store) as run, writing(database):
        run.wait_states("ready", 2)
        choose = random.Random(3)
        for _ in range(12):
            table = choose.choice(("orders", "items"))
            if choose.random() < 0.5:
                outside.load_table_states()
                outside.update_table_state(oid(database, table), INIT)
            else:
                database.execute(f"alter publication shop drop table {table}")
                if choose.random() < 0.5:
                    run.wait_for(lambda table=table: f"public.{table}" not in run.states())  # type: ignore[misc]
                database.execute(f"alter publication shop add table {table}")
            # At any moment of the copy or after it, but not before something has happened.
            before = len(run.destination.batches) + choose.randint(1, 20)
            run.wait_for(lambda before=before: len(run.destination.batches) >= before)  # type: ignore[misc]
        last = oid(database, "orders")
        copies = run.destination.copies.count("orders")
        outside.load_table_states()
        outside.update_table_state(last, INIT)
        run.wait_for(lambda: run.destination.copies.count("orders") > copies)
        wait_ready(run, "items", "orders")
        run.stop()
    outside.close()
    with running(database, run.destination, PostgresStore(database.settings, 1)) as again:
        wait_ready(again, "items", "orders")
        again.wait_caught_up()
        again.assert_equal("orders", "items")
        assert sync_slots(database) == 0


@pytest.mark.invariant(17)
@pytest.mark.versions(14, 17)
@pytest.mark.parametrize("moment", ["while_running", "while_stopped"])
def test_a_publication_that_was_renamed_for_a_moment_has_every_table_copied_again_where_the_server_cannot_pass_it(
    database: Database, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to version 17 a change that was made without the publication ends the server's stream, at every start."""
    database.execute(
        "create table a(id int primary key); insert into a values (1); create table b(id int primary key);"
        " insert into b values (1); create publication shop for table a, b"
    )
    destination, store = MemoryTables(), MemoryStore()
    away = (
        "alter publication shop rename to away",
        "insert into a values (2); delete from b",
        "alter publication away rename to shop",
    )
    with running(database, destination, store) as run:
        run.wait_states("ready", 2)
        if moment == "while_running":
            for statement in away:
                database.execute(statement)
            run.wait_for(lambda: sorted(destination.copies) == ["a", "a", "b", "b"])
            check_after_it_was_away(run, caplog)
            return
        run.stop()
    for statement in away:
        database.execute(statement)
    with running(database, destination, store) as run:
        check_after_it_was_away(run, caplog)


def check_after_it_was_away(run: RunningIntoMemory, caplog: pytest.LogCaptureFixture) -> None:
    run.database.execute("insert into a values (3); insert into b values (3)")
    run.wait_for(lambda: run.destination.copies.count("a") >= 2 and run.destination.copies.count("b") >= 2)
    run.wait_states("ready", 2)
    run.wait_caught_up()
    run.assert_equal("a", "b")
    assert "copied again" in caplog.text
