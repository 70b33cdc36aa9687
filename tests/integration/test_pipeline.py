"""A pipeline from the socket to the lake, as a user runs it, looked at from outside."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from tests.conftest import Database
from tests.pipeline_process import pipeline_process


def test_rows_and_changes_reach_the_lake_and_sigterm_ends_with_status_0(database: Database, tmp_path: Path) -> None:
    database.execute(
        """
        create table orders(id int primary key, total numeric(10, 2), tags text[], note text);
        insert into orders select i, i / 7.0, array['a', null], repeat('x', 3000) || i from generate_series(1, 1000) i;
        create table "Odd ""name" ("Ärger" text primary key, " x.y" int);
        insert into "Odd ""name" values ('ü', 1), ('', null);
        create publication shop for all tables;
        """
    )
    with pipeline_process(database, tmp_path) as run:
        run.start()
        run.wait_ready(2)
        database.execute(
            """
            update orders set total = total + 1 where id <= 10;
            update orders set id = id + 10000 where id between 11 and 20;
            delete from orders where id between 21 and 30;
            insert into orders values (0, null, '{}', 'new');
            begin; truncate "Odd ""name"; insert into "Odd ""name" values ('again', 7); commit;
            """
        )
        run.wait_caught_up()
        assert run.stop() == 0, run.output
        run.assert_equal("orders", 'Odd "name')


@pytest.mark.slow
@pytest.mark.invariant(9)
def test_for_all_tables_idle_for_a_minute_makes_no_lake_commit_and_no_store_write(
    database: Database, tmp_path: Path
) -> None:
    database.execute("create table orders(id int primary key); insert into orders select generate_series(1, 100)")
    database.execute("create publication shop for all tables")

    def seen() -> tuple[object, object]:
        with sqlite3.connect(run.warehouse / "catalog.db") as catalog:
            lake = catalog.execute("select table_name, metadata_location from iceberg_tables").fetchall()
        store = []
        for table in ("table_states", "table_schemas", "destination_tables", "replication_progress"):
            store += database.execute(f"select '{table}', xmin::text, ctid::text from headwater.{table} order by 2, 3")
        return lake, store

    with pipeline_process(database, tmp_path) as run:
        run.start()
        run.wait_ready(1)
        run.wait_caught_up()
        before = seen()
        # The minute itself is what is promised; nothing ends it early.
        time.sleep(60)
        run.still_running()
        assert seen() == before
        assert run.stop() == 0, run.output
