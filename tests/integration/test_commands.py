"""The commands that look at a pipeline from outside or change it, while it runs and while it is stopped."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headwater.config import TableSyncCopyConfig
from headwater.config.pipeline import TableSyncCopyMode
from headwater.events import TableRows
from headwater.schema.table import TableId
from headwater.source.slots import apply_slot_name
from headwater.states import DATA_SYNC, FINISHED_COPY, INIT
from headwater.store.postgres import PostgresStore
from tests.commands import headwater, write_settings
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import RunningIntoMemory, running


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        """
        create table orders(id int primary key, note text);
        insert into orders select i, 'n' from generate_series(1, 100) i;
        create table dates(id int primary key, day date);
        create publication shop for table orders, dates;
        """
    )
    return database


@pytest.fixture
def file(shop: Database, tmp_path: Path) -> Path:
    return write_settings(shop, tmp_path)


def wait_ready(run: RunningIntoMemory, *tables: str) -> None:
    run.wait_for(lambda: run.states() == {f"public.{table}": "ready" for table in tables})


def make_dates_fail(shop: Database, run: RunningIntoMemory) -> None:
    wait_ready(run, "dates", "orders")
    shop.execute("insert into dates values (1, 'infinity')")
    run.wait_states("errored", 1)


def test_these_commands_never_import_spark() -> None:
    program = (
        "import sys, headwater.cli.tables, headwater.cli.rollback, headwater.cli.resync, headwater.cli.remove\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('pyspark', 'py4j')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_tables_shows_states_positions_and_what_to_do_about_errors(shop: Database, file: Path) -> None:
    never_run = headwater("tables", file)
    assert "public.orders: init\n" in never_run
    assert "not running, never started" in never_run
    assert shop.value("select count(*) from pg_namespace where nspname = 'headwater'") == 0
    with running(shop, store=PostgresStore(shop.settings, 1)) as run:
        make_dates_fail(shop, run)
        said = headwater("tables", file)
        assert "public.orders: ready" in said
        assert "public.dates: errored\n  reason: " in said
        assert "\n  hint: " in said
        assert "\n  next attempt: none without `headwater rollback`" in said
        assert "pipeline 1: running, recorded 0/" in said
        assert "of WAL held" in said
        assert f"headwater rollback {file} public.dates" in said
        run.stop()
    assert "pipeline 1: not running, recorded 0/" in headwater("tables", file)


@pytest.mark.promise("rollback to the previous state")
def test_rollback_of_a_running_pipelines_table_leads_to_a_new_copy(shop: Database, file: Path) -> None:
    with running(shop, store=PostgresStore(shop.settings, 1)) as run:
        make_dates_fail(shop, run)
        shop.execute("delete from dates; insert into dates values (2, '2026-01-01')")
        assert "copied again now" in headwater("rollback", file, "public.dates")
        wait_ready(run, "dates", "orders")
        shop.execute("insert into dates values (3, '2026-01-02')")
        run.wait_caught_up()
        run.assert_equal("dates", "orders")
        assert (run.destination.copies.count("dates"), run.destination.copies.count("orders")) == (2, 1)


@pytest.mark.promise("rollback to the previous state")
def test_rollback_of_a_stopped_pipelines_table_never_leads_straight_to_ready(shop: Database, file: Path) -> None:
    destination = MemoryTables()
    with running(shop, destination, PostgresStore(shop.settings, 1)) as run:
        make_dates_fail(shop, run)
        run.stop()
    shop.execute("delete from dates; insert into dates values (2, '2026-01-01')")
    said = headwater("rollback", file, "public.dates")
    assert f"when the pipeline is started: headwater run {file}" in said
    assert shop.value("select count(*) from headwater.table_states where state ->> 'phase' = 'init'") == 1
    # It was copied before: that a first copy would be skipped is no matter any more.
    skip = TableSyncCopyConfig(mode=TableSyncCopyMode.SKIP_ALL)
    with running(shop, destination, PostgresStore(shop.settings, 1), table_sync_copy=skip) as run:
        wait_ready(run, "dates", "orders")
        assert destination.copies.count("dates") == 2
        run.assert_equal("dates", "orders")


def test_rollback_is_only_for_tables_that_stopped(shop: Database, file: Path) -> None:
    with running(shop, store=PostgresStore(shop.settings, 1)) as run:
        wait_ready(run, "dates", "orders")
        said = headwater("rollback", file, "public.orders", status=1)
        assert "error: table public.orders did not stop with an error" in said
        assert f"headwater resync {file} public.orders" in said
        assert "it has public.dates, public.orders" in headwater("rollback", file, "public.x", status=1)
        assert run.destination.copies.count("orders") == 1


@pytest.mark.parametrize("tables", [("public.orders",), ("--all",)])
def test_resync_while_running_copies_again_without_disturbing_the_rest(
    shop: Database, file: Path, tables: tuple[str, ...]
) -> None:
    with running(shop, store=PostgresStore(shop.settings, 1)) as run:
        wait_ready(run, "dates", "orders")
        # What only a new copy mends: the destination lost a row.
        del run.destination.tables["orders"][7]
        slot = "select active_pid from pg_replication_slots where slot_name = %s"
        sender = shop.value(slot, [apply_slot_name(1)])
        headwater("resync", file, *tables)
        run.wait_for(lambda: run.destination.copies.count("orders") == 2)
        wait_ready(run, "dates", "orders")
        shop.execute("update orders set note = 'later' where id < 20")
        run.wait_caught_up()
        run.assert_equal("orders", "dates")
        assert run.destination.copies.count("dates") == (2 if tables == ("--all",) else 1)
        assert shop.value(slot, [apply_slot_name(1)]) == sender


def test_resync_of_a_table_in_mid_copy_ends_that_copy_and_starts_another(
    shop: Database, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    destination, begun, release = MemoryTables(), threading.Event(), threading.Event()
    epochs: list[str] = []

    def block(rows: TableRows) -> None:
        epochs.append(rows.epoch)
        if len(epochs) == 1:
            begun.set()
            assert release.wait(60)

    destination.during_copy = block
    with running(shop, destination, PostgresStore(shop.settings, 1)) as run:
        assert begun.wait(30)
        headwater("resync", file, "public.orders")
        run.wait_for(lambda: "a new copy was asked for" in caplog.text)
        time.sleep(
            0.7
        )  # time enough for another copy to begin, if it did not wait for this one to leave the destination
        assert len(epochs) == 1
        release.set()
        run.wait_for(lambda: len(epochs) == 2)
        wait_ready(run, "dates", "orders")
        run.assert_equal("orders")


def test_a_new_copy_asked_for_is_not_overruled_by_what_a_worker_records(shop: Database) -> None:
    ours, theirs = PostgresStore(shop.settings, 1), PostgresStore(shop.settings, 1)
    ours.start()
    table = TableId(shop.value("select 'orders'::regclass::oid::bigint"))
    ours.update_table_state(table, INIT)
    ours.update_table_state(table, DATA_SYNC)
    theirs.load_table_states()
    theirs.update_table_state(table, INIT)
    ours.update_table_state(table, FINISHED_COPY)
    ours.load_table_states()
    assert ours.get_table_state(table) == INIT
    ours.update_table_state(table, DATA_SYNC)
    theirs.load_table_states()
    assert theirs.get_table_state(table) == DATA_SYNC
    ours.close()
    theirs.close()


def test_remove_refuses_while_the_pipeline_runs_and_asks_before_it_acts(shop: Database, file: Path) -> None:
    with running(shop, store=PostgresStore(shop.settings, 1)) as run:
        wait_ready(run, "dates", "orders")
        said = headwater("remove", file, "--yes", status=1)
        assert "error: pipeline 1 is running" in said
        assert "hint: Stop it first" in said
        run.stop()
    assert "The lake is kept. [y/N]" in headwater("remove", file, answer="n\n", status=1)
    assert shop.value("select count(*) from pg_replication_slots where database = current_database()") == 1
    assert shop.value("select count(*) from headwater.table_states") == 2


def test_remove_leaves_nothing_of_the_pipeline_but_the_lake(shop: Database, file: Path) -> None:
    destination, other = MemoryTables(), PostgresStore(shop.settings, 2)
    with running(shop, destination, PostgresStore(shop.settings, 1)) as run:
        wait_ready(run, "dates", "orders")
        run.stop()
    with running(shop, store=other, id=2) as run:
        wait_ready(run, "dates", "orders")
        run.stop()
    said = headwater("remove", file, answer="y\n")
    assert "dropped headwater_apply_1" in said
    assert "namespace" not in said
    slots = "select slot_name from pg_replication_slots where database = current_database()"
    assert shop.execute(slots) == [("headwater_apply_2",)]
    for table in ("table_states", "table_schemas", "destination_tables", "replication_progress"):
        assert shop.value(f"select count(*) from headwater.{table} where pipeline_id = 1") == 0
    assert shop.value("select count(*) from headwater.table_states where pipeline_id = 2") == 2
    file.write_text(file.read_text().replace("id = 1", "id = 2"))
    assert "the namespace headwater with it" in headwater("remove", file, "--yes")
    assert shop.value("select count(*) from pg_namespace where nspname = 'headwater'") == 0
    assert shop.execute(slots) == []
    again = headwater("remove", file, "--yes")
    assert again.startswith("nothing was found: ")
    # Removed, it may begin anew.
    with running(shop, destination, PostgresStore(shop.settings, 1)) as run:
        wait_ready(run, "dates", "orders")
        run.assert_equal("orders")
