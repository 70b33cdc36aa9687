"""Groups of small tables: one slot, one exported snapshot and one job for all, and yet each table for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from pyspark.sql import SparkSession

from headwater.config import DestinationConfig
from headwater.destinations.iceberg.destination import IcebergDestination
from headwater.destinations.iceberg.warehouse import warehouse_path
from headwater.engine.pipeline import Pipeline
from headwater.engine.table_sync import copy as sync_copy
from headwater.engine.table_sync import copy_planner, groups
from headwater.errors import DestinationError, DestinationUnavailable, Retry
from headwater.events import EventBatch, TableRows
from headwater.schema.table import TableId, TableName
from headwater.source.slots import apply_slot_name
from headwater.states import INIT, Phase, TableState
from headwater.store.memory import MemoryStore
from headwater.testing.compare import compare_table, wait_until
from headwater.testing.lake_rows import open_lake
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS
from tests.integration.running_pipeline import RunningIntoMemory, config, running, sync_slot
from tests.integration.small_tables import BlockingCopyDestination, make_tables, writing

SLOT = apply_slot_name(1)
TABLES = 8

pytestmark = PYSPARK_SOCKETS


def oid(database: Database, name: str) -> TableId:
    return TableId(database.value("select %s::regclass::oid::bigint", [name]))


def slots(database: Database) -> list[str]:
    rows = database.execute("select slot_name from pg_replication_slots where database = current_database() order by 1")
    return [name for (name,) in rows]


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
@pytest.mark.promise("the apply worker pauses shortly, and the longest pause is shown")
def test_a_group_shares_one_slot_and_one_snapshot_and_pauses_the_apply_worker_once(database: Database) -> None:
    names = make_tables(database, TABLES)
    destination = BlockingCopyDestination("t3")
    with running(database, destination) as run:
        assert destination.begun.wait(30)
        assert slots(database) == [SLOT, sync_slot(database, "group")]
        destination.open.set()
        run.wait_states("ready", TABLES)
        assert set(destination.starts) == set(names)
        assert len(set(destination.starts.values())) == 1
        snapshot = run.pipeline.progress.snapshot()
        assert snapshot.hand_offs == 1
        # Nobody's changes waited for it: there was no other table yet.
        assert snapshot.longest_pause_seconds == 0
        run.wait_for(lambda: slots(database) == [SLOT])
        run.assert_equal(*names)


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_large_tables_have_a_slot_each_beside_a_group(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "SMALL_TABLE_BYTES", 64 << 10)
    make_tables(database, 3)
    database.execute("create table large(id int primary key, note text)")
    database.execute("insert into large select i, repeat('x', 100) from generate_series(1, 2000) i")
    destination = BlockingCopyDestination("large")
    with running(database, destination) as run:
        assert destination.begun.wait(30)
        assert sync_slot(database, oid(database, "large")) in slots(database)
        # The others do not wait for it.
        run.wait_states("ready", 3)
        destination.open.set()
        run.wait_states("ready", 4)
        run.assert_equal("t0", "t1", "t2", "large")


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_a_table_that_has_grown_since_it_was_listed_leaves_its_group(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        copy_planner, "SMALL_TABLE_BYTES", 64 << 10
    )  # as if it had been smaller when groups were formed
    names = make_tables(database, TABLES)
    database.execute("create table grown(id int primary key, note text)")
    database.execute("insert into grown select i, repeat('x', 100) from generate_series(1, 2000) i")
    destination = BlockingCopyDestination()
    with running(database, destination) as run:
        run.wait_states("ready", TABLES + 1)
        run.assert_equal(*names, "grown")
        assert sorted(destination.copies) == sorted([*names, "grown"])
        assert len({destination.starts[name] for name in names}) == 1
        assert destination.starts["grown"] != destination.starts["t0"]


@pytest.mark.promise("rows written during the copy are neither lost nor doubled")
def test_rows_written_during_a_groups_copy_are_neither_lost_nor_doubled(database: Database) -> None:
    names = make_tables(database, TABLES)
    with writing(database, names), running(database) as run:
        run.wait_states("ready", TABLES)
        before = len(run.destination.batches)
        run.wait_for(lambda: len(run.destination.batches) > before + 10)
        run.stop()
    with running(database, run.destination, run.pipeline._store) as again:
        again.wait_caught_up()
        again.assert_equal(*names)
        assert sorted(again.destination.copies) == names


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
@pytest.mark.invariant(15)
def test_one_bad_table_of_a_group_is_errored_and_the_others_become_ready(database: Database) -> None:
    names = make_tables(database, TABLES)
    database.execute("create table dates(id int primary key, day date); insert into dates values (1, 'infinity')")
    with running(database) as run:
        run.wait_states("ready", TABLES)
        run.wait_states("errored", 1)
        assert run.states()["public.dates"] == "errored"
        run.wait_for(lambda: slots(database) == [SLOT])
        assert sorted(run.destination.copies) == names
        run.assert_equal(*names)


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
@pytest.mark.invariant(15)
def test_a_value_that_comes_while_a_group_follows_its_slot_errs_its_table_alone(database: Database) -> None:
    names = make_tables(database, TABLES)
    database.execute("create table dates(id int primary key, day date)")
    destination = BlockingCopyDestination("t3")
    with running(database, destination) as run:
        assert destination.begun.wait(30)
        database.execute("insert into dates values (1, 'infinity'); update t5 set counter = 2")
        destination.open.set()
        run.wait_states("ready", TABLES)
        run.wait_states("errored", 1)
        run.assert_equal(*names)


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
@pytest.mark.invariant(15)
def test_a_destination_that_does_not_name_the_failing_table_gets_the_batch_table_by_table(database: Database) -> None:
    names = make_tables(database, TABLES)
    destination = BlockingCopyDestination("t3")

    def refuse(batch: EventBatch) -> None:
        if oid(database, "t5") in batch.tables:
            raise DestinationError("no room", hint="Make room.", retry=Retry.MANUAL)

    destination.before_events = refuse
    with running(database, destination) as run:
        assert destination.begun.wait(30)
        database.execute(
            "begin; update t4 set counter = 2; update t5 set counter = 2; update t6 set counter = 2; commit"
        )
        destination.open.set()
        run.wait_states("ready", TABLES - 1)
        run.wait_states("errored", 1)
        assert run.states()["public.t5"] == "errored"
        run.assert_equal(*(name for name in names if name != "t5"))


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
@pytest.mark.invariant(15)
def test_an_unreachable_destination_in_the_middle_of_a_group_marks_no_table_failed(database: Database) -> None:
    names = make_tables(database, TABLES)
    failures = iter(range(3))

    def away(rows: TableRows) -> None:
        if next(failures, None) is not None:
            raise DestinationUnavailable("the lake is away", hint="wait")

    destination = MemoryTables()
    destination.before_copy = away
    store = MemoryStore()
    with running(database, destination, store) as run:
        run.wait_states("ready", TABLES)
        run.assert_equal(*names)
    assert all(state.retry_policy is None for state in store.get_table_states().values())


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
@pytest.mark.invariant(15)
def test_a_lost_exported_snapshot_of_a_group_marks_no_table_failed(database: Database) -> None:
    names = make_tables(database, TABLES)
    store, destination = MemoryStore(), BlockingCopyDestination("t3")
    errored = list[TableId]()
    record = store.update_table_states

    def watch(updates: Sequence[tuple[TableId, TableState]]) -> None:
        errored.extend(table for table, state in updates if state.phase is Phase.ERRORED)
        record(updates)

    store.update_table_states = watch  # type: ignore[method-assign]
    with running(database, destination, store) as run:
        assert destination.begun.wait(30)
        end = "select pg_terminate_backend(pid, 10000) from pg_stat_activity where backend_type = 'walsender'"
        assert database.value(f"{end} and application_name = %s", [sync_slot(database, "group")])
        destination.open.set()
        run.wait_states("ready", TABLES)
        run.wait_caught_up()
        run.assert_equal(*names)
    assert errored == []


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_a_table_that_leaves_while_its_group_is_copied_holds_no_other_up(database: Database) -> None:
    names = make_tables(database, TABLES)
    database.execute("drop publication shop; create publication shop for table " + ", ".join(names))
    store, destination = MemoryStore(), BlockingCopyDestination("t3")
    others = [name for name in names if name != "t3"]
    with running(database, destination, store) as run:
        assert destination.begun.wait(30)
        left = oid(database, "t3")
        database.execute("alter publication shop drop table t3")
        run.wait_states("ready", TABLES - 1)
        # Its copy is still under way in the destination: what we know of it stays until that has ended.
        assert left in store.get_table_states()
        destination.open.set()
        run.wait_for(lambda: left not in store.get_table_states())
        run.wait_for(lambda: slots(database) == [SLOT])
        run.wait_caught_up()
        run.assert_equal(*others)


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_a_new_copy_asked_for_in_the_middle_of_a_group_concerns_its_table_alone(database: Database) -> None:
    names = make_tables(database, TABLES)
    store, destination = MemoryStore(), BlockingCopyDestination("t3")
    with running(database, destination, store) as run:
        assert destination.begun.wait(30)
        store.update_table_state(oid(database, "t3"), INIT)
        run.wait_states("ready", TABLES - 1)
        destination.open.set()
        run.wait_states("ready", TABLES)
        run.wait_caught_up()
        run.assert_equal(*names)
        assert [destination.copies.count(name) for name in names if name != "t3"] == [1] * (TABLES - 1)
        assert len(set(destination.starts.values())) == 2, "the table was copied again at a position of its own"


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_a_group_that_was_interrupted_starts_again_and_ends_equal(database: Database) -> None:
    names = make_tables(database, TABLES)
    store, destination = MemoryStore(), BlockingCopyDestination("t7")
    with writing(database, names):
        with running(database, destination, store) as run:
            assert destination.begun.wait(30)
            run.wait_for(lambda: list(run.states().values()).count("finished_copy") == TABLES - 1)
            run.stop()
        destination.open.set()
        with running(database, destination, store) as again:
            again.wait_states("ready", TABLES)
            again.stop()
    with running(database, destination, store) as last:
        last.wait_caught_up()
        last.assert_equal(*names)


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_a_changed_schema_in_a_group_starts_its_table_again_and_no_other(database: Database) -> None:
    names = make_tables(database, TABLES)
    destination = BlockingCopyDestination("t3")
    with running(database, destination) as run:
        assert destination.begun.wait(30)
        run.wait_for(lambda: list(run.states().values()).count("finished_copy") == TABLES - 1)
        with database.connect() as other:
            change = threading.Thread(target=other.execute, args=("alter table t5 add column extra int default 7",))
            change.start()
            waiting = "select count(*) from pg_locks where not granted and mode = 'AccessExclusiveLock'"
            wait_until(lambda: database.value(waiting) == 1, 30, what="the statement to wait")
            destination.open.set()
            change.join()
        database.execute("update t5 set counter = 2 where id = 1")
        run.wait_for(lambda: destination.copies.count("t5") == 2)
        run.wait_states("ready", TABLES)
        run.wait_caught_up()
        run.assert_equal(*names)
        assert [destination.copies.count(name) for name in names if name != "t5"] == [1] * (TABLES - 1)


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
@pytest.mark.invariant(1)
def test_a_migration_over_several_tables_of_a_group_goes_first_and_is_no_deadlocks_victim(database: Database) -> None:
    """A lock on the second table that waits for the first would make Postgres end the migration."""
    names = make_tables(database, TABLES)
    destination, away = MemoryTables(), threading.Event()
    away.set()

    def refuse(rows: TableRows) -> None:
        if away.is_set():
            raise DestinationUnavailable("the lake is away", hint="wait")

    destination.before_copy = refuse
    with running(database, destination) as run, database.connect() as migration:
        # Whoever looks first is the victim: this one does.
        migration.execute("set deadlock_timeout = '10ms'")
        run.wait_for(lambda: bool(run.pipeline.progress.snapshot().errors))
        migration.execute("begin")
        migration.execute("alter table t5 add column extra int default 7")
        away.clear()
        held = (
            "select count(*) from pg_locks l join pg_stat_activity a using (pid) where l.relation = 't0'::regclass"
            " and l.mode = 'AccessShareLock' and l.granted and starts_with(a.application_name, 'headwater_sync_1_group')"
        )
        wait_until(lambda: database.value(held) == 1, 30, what="a group to hold its tables")
        migration.execute("alter table t0 add column extra int default 7")
        migration.execute("commit")
        run.wait_states("ready", TABLES)
        run.wait_caught_up()
        run.assert_equal(*names)


@pytest.mark.promise("1,000 tables")
def test_a_thousand_small_tables_reach_ready_and_end_equal(database: Database) -> None:
    names = make_tables(database, 1000, rows=3)
    with running(database) as run:
        run.wait_states("ready", 1000, timeout=240)
        database.execute("; ".join(f"update {name} set counter = 2 where id = 1" for name in names))
        run.wait_caught_up()
        run.assert_equal(*names)
        assert sorted(run.destination.copies) == sorted(names)


# With Spark: the rows of a group are read by one job.


@contextmanager
def running_with_spark(
    database: Database, spark: SparkSession, destination: MemoryTables
) -> Iterator[RunningIntoMemory]:
    pipeline = Pipeline(config(database), MemoryStore(), destination, spark=spark)
    pipeline.start()
    try:
        yield RunningIntoMemory(database, pipeline, destination)
    finally:
        pipeline.shutdown()
        pipeline.wait(60)


def jobs_with_tag(spark: SparkSession, tag: str) -> list[int]:
    return list(spark.sparkContext._jsc.sc().statusTracker().getJobIdsForTag(tag))


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_a_group_is_read_by_one_spark_job(database: Database, spark: SparkSession) -> None:
    names = make_tables(database, TABLES)
    database.execute("create table nothing(id int primary key)")
    database.execute("create table dates(id int primary key, day date); insert into dates values (1, '-infinity')")
    destination = BlockingCopyDestination("nothing")
    with running_with_spark(database, spark, destination) as run:
        assert destination.begun.wait(60)
        tag = f"headwater-copy-{sync_slot(database, 'group')}"
        destination.open.set()
        run.wait_states("ready", TABLES + 1)
        # The bad one has failed in the same job, by itself.
        assert run.states()["public.dates"] == "errored"
        assert any("'day' holds a date value" in error for error in run.pipeline.progress.snapshot().errors)
        run.assert_equal(*names, "nothing")
    # The destination reads the rows that the driver holds: there is no other job.
    assert len(jobs_with_tag(spark, tag)) == 1
    for name in (*names, "nothing"):
        assert jobs_with_tag(spark, f"headwater-copy-1-{oid(database, name)}") == []


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_tables_beyond_the_memory_of_a_group_are_read_by_themselves(
    database: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_copy, "HELD_BYTES", 16 << 10)
    names = make_tables(database, TABLES, rows=400)
    with running_with_spark(database, spark, MemoryTables()) as run:
        run.wait_states("ready", TABLES)
        run.assert_equal(*names)
        assert sorted(run.destination.copies) == names


@pytest.mark.promise("1,000 tables")
@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_small_tables_in_iceberg_end_equal(
    database: Database, spark: SparkSession, lake_settings: DestinationConfig, count: int
) -> None:
    names = make_tables(database, count, prefix=f"shelf{count}_")
    types = (
        "big numeric(20, 4) default 1.5, add column at timestamp default now(), add column tags text[] default '{a}'"
    )
    database.execute(f"alter table {names[1]} add column {types}")
    database.execute(f"truncate {names[2]}")
    store = MemoryStore()
    destination = IcebergDestination(spark, store, lake_settings)
    pipeline = Pipeline(config(database, id=70 + count), store, destination, spark=spark)
    with writing(database, names[:2]):
        pipeline.start()
        run = RunningIntoMemory(database, pipeline, MemoryTables())
        run.wait_states("ready", count, timeout=20 * count)
    run.wait_caught_up()
    run.stop()
    warehouse = warehouse_path(lake_settings)
    assert warehouse is not None
    lake = open_lake(warehouse)
    for name in names:
        compare_table(database.connection, TableName("public", name), lake).assert_equal()
