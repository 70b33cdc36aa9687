"""The command line as a user meets it: another process, a real server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from headwater.schema.table import TableName
from headwater.testing.compare import compare_table, confirmed_position, flush_position, wait_until
from headwater.testing.lake_rows import open_lake
from tests.commands import HEADWATER, headwater, write_settings
from tests.conftest import Database


def test_wrong_settings_end_with_status_2_and_every_mistake(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text('id = 0\n[destination]\nwarehose = "x"\n')
    done = subprocess.run([*HEADWATER, "run", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: pipeline.toml has ")
    for key in ("id:", "publication_name:", "pg_connection.host:", "destination.warehose:", "destination.warehouse:"):
        assert key in done.stderr
    assert "Traceback" not in done.stderr


def test_a_source_out_of_reach_ends_with_status_1_and_without_the_password(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(
        'id = 1\npublication_name = "p"\n[pg_connection]\nhost = "127.0.0.1"\nport = 9\nname = "d"\nusername = "u"\n'
        'password = { env = "PASSWORD" }\n[destination]\nwarehouse = "lake"\n'
    )
    environment = {**os.environ, "PASSWORD": "hunter2hunter2"}
    done = subprocess.run([*HEADWATER, "run", str(file)], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "127.0.0.1:9" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_run_follows_until_a_signal_and_stops_in_order(database: Database, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key, v text); create publication p for table t")
    database.execute("insert into t select i, 'row ' || i from generate_series(1, 1000) i")
    file = write_settings(database, tmp_path, id=71, publication="p")
    with (tmp_path / "output").open("w+") as output:
        process = subprocess.Popen([*HEADWATER, "run", str(file)], stdout=output, stderr=subprocess.STDOUT)
        try:

            def said() -> str:
                return (tmp_path / "output").read_text()

            def running() -> None:
                assert process.poll() is None, said()

            wait_until(lambda: "public.t: ready" in said(), 90, what="the table to be ready", still_good=running)
            database.execute("update t set v = 'changed' where id <= 10; delete from t where id > 990")
            target = flush_position(database.connection)
            wait_until(
                lambda: confirmed_position(database.connection, "headwater_apply_71") >= target,
                60,
                what="the lake to catch up",
                still_good=running,
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, said()
        finally:
            process.kill()
            process.wait()
    assert said().rstrip().endswith("stopped")
    compare_table(database.connection, TableName("public", "t"), open_lake(tmp_path / "lake")).assert_equal()


def test_resync_puts_states_back_and_makes_a_new_slot(database: Database, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key); create table u (id int primary key)")
    database.execute("create publication p for table t, u")
    file = write_settings(database, tmp_path, id=72, publication="p")
    assert headwater("resync", file, "public.t").startswith("1 table is copied again")
    assert "it has public.t, public.u" in headwater("resync", file, "public.x", status=1)
    headwater("resync", file, "--all")
    assert confirmed_position(database.connection, "headwater_apply_72") > 0
    headwater("resync", file, status=2)


@pytest.mark.slow
def test_the_demo_ends_equal(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    command = [*HEADWATER, "demo", "--rows", "20000", "--seconds", "5", "--keep", str(lake)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"public\.(\w+)[ |]+([\d,]+)[ |]+0[ |]+0[ |]+0[ |]+equal", done.stdout)
    assert {name for name, _ in rows} == {"customers", "items", "orders", "products"}
    assert f"The tables are in {lake}" in done.stdout
    assert (lake / "catalog.db").exists()


def test_the_demo_refuses_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = subprocess.run([*HEADWATER, "demo", "--keep", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "not empty" in done.stderr
    assert (tmp_path / "mine").read_text() == "precious"
