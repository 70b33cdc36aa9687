"""All sessions of a server share one table of locks, and whoever finds it full fails: "out of shared memory". Whatever is copied
and followed, however many partitions it has, most of that table stays free for others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from headwater.engine.table_sync import copy_planner
from headwater.errors import SchemaError, StartAgain
from headwater.source import exported_snapshot as exported_snapshot_module
from headwater.source import leaves
from headwater.source import rows as rows_module
from headwater.source.catalog import load_table_schemas
from headwater.source.copy_read import open_at_snapshot, read_ranges
from headwater.source.exported_snapshot import exported_snapshot
from headwater.source.leaves import check_unique
from headwater.source.partitions import locks_to_read
from headwater.source.preflight import run_preflight
from headwater.source.publication import published_tables
from headwater.source.rows import read_rows
from headwater.source.session import connect
from headwater.source.table_lock import TableLock, TablesTaken, table_lock
from headwater.testing.compare import wait_until
from headwater.testing.postgres import PostgresServer
from tests.conftest import Database, fresh_database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import running

SMALL = {
    "max_connections": "25",
    "max_locks_per_transaction": "10",
    "max_worker_processes": "4",
    "max_wal_senders": "8",
}
"""A lock table with room for less than a thousand; the server's own default has room for some 7,000."""
LEAVES = """
do $$
begin
    for i in 1..{count} loop
        execute format('create table {root}_%s partition of {root} for values from (%s) to (%s)', i, i * 10, i * 10 + 10);
        execute format('insert into {root}_%s (id, v) values (%s, ''first'')', i, i * 10);
        if i % 5 = 0 then commit; end if;
    end loop;
end $$
"""


def make_root(database: Database, root: str, count: int, columns: str = "id int primary key, v text") -> None:
    database.execute(f"create table {root} ({columns}) partition by range (id)")
    database.execute(LEAVES.format(root=root, count=count))


@pytest.fixture(scope="module")
def small_server() -> Iterator[PostgresServer]:
    with PostgresServer.start(settings=SMALL) as server:
        yield server


@pytest.fixture
def small(small_server: PostgresServer) -> Iterator[Database]:
    with fresh_database(small_server) as made:
        yield made


@contextmanager
def unrelated(database: Database, tables: int) -> Iterator[list[psycopg.Error]]:
    """Another application, which locks so many tables again and again. What went wrong for it."""
    names = [f"other_{i}" for i in range(tables)]
    for name in names:
        database.execute(f"create table {name} ()")
    failed: list[psycopg.Error] = []
    end, has_locked = threading.Event(), threading.Event()

    def lock() -> None:
        with database.connect() as session:
            while not end.is_set():
                try:
                    with session.transaction():
                        session.execute(f"lock table {', '.join(names)} in share mode")
                    has_locked.set()
                except psycopg.Error as error:
                    failed.append(error)
                    return

    thread = threading.Thread(target=lock)
    thread.start()
    try:
        assert has_locked.wait(60)
        yield failed
    finally:
        end.set()
        thread.join()


def rows_of(database: Database, root: str) -> dict[int, tuple[object, ...]]:
    leaves = database.execute("select inhrelid::regclass::text from pg_inherits where inhparent = %s::regclass", [root])
    return {row[0]: row for (leaf,) in leaves for row in database.execute(f"select * from {leaf}")}


def copy_and_follow(database: Database, roots: int, leaf_count: int, others: int) -> None:
    names = [f"root_{i}" for i in range(roots)]
    for name in names:
        make_root(database, name, leaf_count)
    database.execute(f"create publication shop for table {', '.join(names)} with (publish_via_partition_root = true)")
    with unrelated(database, others) as failed, running(database) as run:
        run.wait_states("ready", roots)
        for name in names:
            # One leaf at a time: a statement over all of them would need all their locks itself.
            for leaf in range(1, leaf_count + 1, 7):
                database.execute(
                    f"update {name}_{leaf} set v = 'second'; insert into {name} values ({leaf * 10 + 1}, 'third')"
                )
                database.execute(f"delete from {name}_{leaf + 1}")
        run.wait_caught_up(120)
        for name in names:
            assert run.destination.tables[name] == rows_of(database, name)
    assert not failed, failed
    assert "out of shared memory" not in database.server.log


def test_a_root_with_more_leaves_than_the_lock_table_is_copied_and_followed(small: Database) -> None:
    copy_and_follow(small, 1, 1500, 40)


def test_small_roots_with_many_leaves_each_are_copied_and_followed(small: Database) -> None:
    copy_and_follow(small, 20, 75, 40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("roots", "leaf_count"), [(1, 10_000), (50, 200)])
def test_ten_thousand_leaves_on_a_server_with_default_limits(roots: int, leaf_count: int) -> None:
    with PostgresServer.start() as server, fresh_database(server) as database:
        copy_and_follow(database, roots, leaf_count, 500)


def test_a_lock_within_the_bound_takes_the_leaves_and_one_beyond_it_the_partitioned_tables(small: Database) -> None:
    small.execute("create table t (id int, v text) partition by range (id)")
    small.execute("create table t_low partition of t for values from (0) to (100) partition by range (id)")
    small.execute("create table t_low_1 partition of t_low for values from (0) to (50)")
    small.execute("create table t_high partition of t for values from (100) to (200)")
    table = small.value("select 't'::regclass::oid::bigint")
    held = """
        select array_agg(relation::regclass::text order by relation::regclass::text) from pg_locks
        where pid = %s and locktype = 'relation' and relation >= 16384
    """
    with table_lock(small.settings, [table], most_relations=4) as lock:
        assert small.value(held, [lock.backend_pid]) == ["t", "t_high", "t_low", "t_low_1"]
    with table_lock(small.settings, [table], most_relations=3) as lock:
        assert small.value(held, [lock.backend_pid]) == ["t", "t_low"]
    with table_lock(small.settings, [table], most_relations=1) as lock:
        assert small.value(held, [lock.backend_pid]) == ["t"]
        lock.check()


def test_tables_that_inherit_from_a_plain_one_are_not_locked_with_it(small: Database) -> None:
    small.execute("create table t (id int primary key); create table child () inherits (t)")
    with table_lock(small.settings, [small.value("select 't'::regclass::oid::bigint")]):
        assert small.value("select count(*) from pg_locks where relation = 'child'::regclass") == 0


def test_a_leaf_rewritten_beyond_the_bound_starts_the_copy_again_and_nothing_is_lost(small: Database) -> None:
    """Its rows are read in ranges of blocks; those of the new storage are others."""
    make_root(small, "t", 40, "id int primary key, v text")
    small.execute("create publication shop for table t with (publish_via_partition_root = true)")
    rewritten = threading.Event()

    def rewrite(_: object) -> None:
        if not rewritten.is_set():
            rewritten.set()
            small.execute("vacuum full t_17")
            small.execute("update t set v = 'second' where id = 170")

    destination = MemoryTables()
    destination.before_copy = rewrite
    with running(small, destination) as run:
        run.wait_states("ready", 1)
        run.wait_caught_up()
        run.assert_equal("t")
    assert rewritten.is_set()


def test_a_leaf_rewritten_between_two_ranges_of_it_is_found(small: Database) -> None:
    """Rows of later blocks lie in earlier ones then, which were read already: they would be missing."""
    make_root(small, "t", 100)
    small.execute("create table t_large partition of t for values from (10000) to (20000)")
    small.execute("insert into t_large select i, repeat('x', 100) from generate_series(10000, 19999) i")
    small.execute("delete from t_large where id < 15000")
    small.execute("analyze t_large")
    small.execute("create publication shop for table t with (publish_via_partition_root = true)")
    with exported_snapshot(small.settings, "shop", target_range_bytes=1 << 18) as snapshot:
        planned = snapshot.tables["public.t"]
        large = [one for one in planned.plan.ranges if one.relation.name == "t_large"]
        assert len(large) > 3
        with open_at_snapshot(snapshot.origin("public.t")) as session:
            first = sum(batch.num_rows for batch in session.read(planned.schema.columns, large[0]))
        small.execute("vacuum full t_large")
        assert first < 5000
        with (
            pytest.raises(StartAgain, match="no longer the table"),
            open_at_snapshot(snapshot.origin("public.t")) as session,
        ):
            list(session.read(planned.schema.columns, large[1]))


def test_rows_of_a_root_beyond_the_bound_are_read_leaf_by_leaf(small: Database) -> None:
    make_root(small, "t", 900)
    small.execute("create publication shop for table t with (publish_via_partition_root = true)")
    with connect(small.settings) as session:
        (table,) = published_tables(session, "shop")
        schema = load_table_schemas(session, [table.id], "shop")[table.id]
        keys = pa.table({"id": pa.array([10, 1500, 2990, 2991, 3000], pa.int32())})
        read = read_rows(session, schema, keys)
        assert sorted(read.rows.column("id").to_pylist()) == [10, 1500, 2990, 3000]
        assert set(read.rows.column("v").to_pylist()) == {"first"}
        assert (
            small.value(
                "select count(*) from pg_locks where pid = %s and relation >= 16384", [session.info.backend_pid]
            )
            == 0
        )
    with unrelated(small, 40) as failed, connect(small.settings) as session:
        for _ in range(3):
            read_rows(session, schema, keys)
    assert not failed, failed


def test_keys_of_a_root_beyond_the_bound_are_not_counted_all_at_once(small: Database) -> None:
    make_root(small, "t", 300, "id int, v text")
    small.execute("create publication shop for table t with (publish_via_partition_root = true)")
    with exported_snapshot(small.settings, "shop") as snapshot, connect(small.settings) as session:
        (table,) = published_tables(session, "shop")
        with pytest.raises(SchemaError) as caught:
            check_unique(small.settings, snapshot.snapshot_name, table, ("v",), 87)
        assert "max_locks_per_transaction" in caught.value.hint
    # Within the bound they are.
    small.execute("create table few (id int, v text) partition by range (id)")
    small.execute("create table few_1 partition of few for values from (0) to (10)")
    small.execute("alter publication shop set table few")
    with exported_snapshot(small.settings, "shop") as snapshot, connect(small.settings) as session:
        (table,) = published_tables(session, "shop")
        check_unique(small.settings, snapshot.snapshot_name, table, ("v",), 87)


def test_an_attempt_asks_only_for_its_own_tables(small: Database) -> None:
    small.execute("create table a (id int primary key); create table b (id int primary key)")
    small.execute("create publication shop for table a, b")
    with connect(small.settings) as session:
        every = published_tables(session, "shop")
        assert [table.name.name for table in every] == ["a", "b"]
        assert published_tables(session, "shop", [every[1].id]) == [every[1]]
        assert published_tables(session, "shop", []) == []


def test_tables_beyond_the_bound_are_counted_before_the_start(small: Database) -> None:
    make_root(small, "t", 40)
    small.execute("create publication shop for table t with (publish_via_partition_root = true)")
    with connect(small.settings) as session:
        (found,) = run_preflight(session, "shop", pipeline_id=1, max_table_sync_workers=4)
        assert "1 table with more partitions than may be locked at once" in found.message
        assert "41 relations" in found.detail
        assert not run_preflight(session, "shop", pipeline_id=1, max_table_sync_workers=1)


def test_a_leaf_rewritten_between_the_snapshot_and_the_plan_loses_no_row(
    small: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new storage is empty at the snapshot, and nothing would tell it from the old one."""
    make_root(small, "t", 100)
    small.execute("create publication shop for table t with (publish_via_partition_root = true)")
    load, rewrites = load_table_schemas, ["set unlogged", "set logged"]

    def rewritten(*arguments: Any) -> Any:
        while rewrites:
            small.execute(f"alter table t_17 {rewrites.pop(0)}")
        return load(*arguments)

    monkeypatch.setattr(exported_snapshot_module, "load_table_schemas", rewritten)
    with exported_snapshot(small.settings, "shop") as snapshot:
        ranges = snapshot.tables["public.t"].plan.ranges
        ids = [row["id"] for batch in read_ranges(snapshot.origin("public.t"), ranges) for row in batch.to_pylist()]
        snapshot.check()
    assert sorted(ids) == [i * 10 for i in range(1, 101)]


def test_a_copy_beyond_the_bound_is_planned_without_waiting_for_a_session_that_has_a_leaf_locked(
    small: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has a leaf may want the root next, which is locked for the copy: one of the two would be a deadlock's victim."""
    make_root(small, "t", 100)
    small.execute("create publication shop for table t with (publish_via_partition_root = true)")
    plan, planned = TableLock.plan, threading.Event()
    with small.connect() as other:

        def planned_beside_a_migration(self: TableLock, *arguments: Any, **named: Any) -> Any:
            if planned.is_set():
                return plan(self, *arguments, **named)
            other.execute("begin; lock table t_17 in access exclusive mode")
            found = plan(self, *arguments, **named)
            planned.set()
            return found

        monkeypatch.setattr(TableLock, "plan", planned_beside_a_migration)
        with running(small) as run:
            run.wait_for(planned.is_set)
            # Waits for our lock on the root; the copy, which cannot read the leaf, starts again and lets it go first.
            other.execute("alter table t add column w int")
            other.execute("commit")
            run.wait_states("ready", 1)
            run.wait_caught_up()
            assert run.destination.tables["t"] == rows_of(small, "t")


def test_counting_keys_does_not_queue_behind_a_session_that_waits_for_the_copys_lock(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres sees no deadlock in that, since only we know that the sessions belong together."""
    database.execute("create table t (id int not null, p int not null, v text) partition by list (p)")
    for p in (1, 2):
        database.execute(
            f"create table t_{p} partition of t for values in ({p}); alter table t_{p} add primary key (id)"
        )
    database.execute("insert into t values (1, 1, 'a'), (2, 2, 'b')")
    database.execute("create publication shop for table t with (publish_via_partition_root = true)")
    monkeypatch.setattr(leaves, "_LOCK_SECONDS", 1)
    count, begun, migrated = check_unique, threading.Event(), threading.Event()
    waiting = (
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like 'alter table t add%%'"
    )

    def migrate() -> None:
        with database.connect() as other:
            other.execute("alter table t add column w int")
            migrated.set()

    migration = threading.Thread(target=migrate, daemon=True)

    def counted(*arguments: Any) -> None:
        if not begun.is_set():
            begun.set()
            migration.start()
            wait_until(lambda: database.value(waiting) == 1, 30, what="the migration to wait for us")
        count(*arguments)

    monkeypatch.setattr(copy_planner, "check_unique", counted)
    with running(database) as run:
        run.wait_for(migrated.is_set)
        run.wait_states("ready", 1)
        run.wait_caught_up()
        run.assert_equal("t")
    migration.join()


@pytest.mark.versions
def test_a_snapshot_of_several_tables_waits_for_none_while_it_holds_another(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("create table a (id int primary key); create table b (id int primary key)")
    database.execute("create publication shop for table a, b")
    asks, is_taken, refused, has_snapshot = (threading.Event() for _ in range(4))
    real = table_lock

    @contextmanager
    def watched(*arguments: Any, **options: Any) -> Iterator[TableLock]:
        # The publication has been read: on 18 that waits behind whoever has a published table for itself.
        asks.set()
        assert is_taken.wait(30)
        try:
            with real(*arguments, **options) as lock:
                yield lock
        except TablesTaken:
            refused.set()
            raise

    monkeypatch.setattr(exported_snapshot_module, "table_lock", watched)

    def export() -> None:
        with exported_snapshot(database.settings, "shop"):
            has_snapshot.set()

    exporting = threading.Thread(target=export, daemon=True)
    waiting = "select count(*) from pg_locks where not granted and relation = 'b'::regclass"
    exporting.start()
    assert asks.wait(30)
    with database.connect() as other, other.transaction():
        other.execute("alter table b add column w int")
        is_taken.set()
        wait_until(
            lambda: refused.is_set() or database.value(waiting) > 0, 30, what="the snapshot to ask for its locks"
        )
        # Would end in a deadlock, with this session as its victim, if the other waited for b with a in its hands.
        other.execute("alter table a add column w int")
    exporting.join(60)
    assert has_snapshot.is_set()


@pytest.mark.parametrize("leaf_count", [3, 100])
def test_rows_of_a_leaf_rewritten_behind_the_snapshot_are_not_taken_for_deleted(
    small: Database, monkeypatch: pytest.MonkeyPatch, leaf_count: int
) -> None:
    make_root(small, "t", leaf_count)
    small.execute("create publication shop for table t with (publish_via_partition_root = true)")
    real = locks_to_read

    def rewritten(*arguments: Any) -> int:
        small.execute("alter table t_2 set unlogged")
        small.execute("alter table t_2 set logged")
        return real(*arguments)

    monkeypatch.setattr(rows_module, "locks_to_read", rewritten)
    with connect(small.settings) as session:
        (table,) = published_tables(session, "shop")
        schema = load_table_schemas(session, [table.id], "shop")[table.id]
        with pytest.raises(SchemaError, match="no longer be read") as caught:
            read_rows(session, schema, pa.table({"id": pa.array([10, 20], pa.int32())}))
    assert "rewritten" in caught.value.detail
