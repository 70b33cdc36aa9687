"""The command line as a user meets it: another process, a real server."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from headwater.source.slots import apply_slot_name
from headwater.testing.compare import confirmed_position, flush_position, wait_until
from tests.commands import HEADWATER, headwater, write_settings
from tests.conftest import Database
from tests.pipeline_process import pipeline_process


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


@contextmanager
def locked_catalog(warehouse: Path) -> Iterator[None]:
    """Nobody reads the catalog or commits meanwhile: a batch that is under way stays so."""
    with closing(sqlite3.connect(warehouse / "catalog.db", isolation_level=None, timeout=30)) as catalog:
        catalog.execute("begin exclusive")
        yield
        catalog.execute("rollback")


@pytest.fixture
def told_often(database: Database) -> None:
    """The driver tells every two seconds what it has received, so that a test need not wait long to know."""
    database.execute(f"alter database {database.name} set wal_sender_timeout = '6s'")


@pytest.mark.promise("buffered writes drain before shutdown")
@pytest.mark.usefixtures("told_often")
def test_run_says_that_it_is_up_and_stops_in_order_after_the_batch_under_way(
    database: Database, tmp_path: Path
) -> None:
    database.execute("create table t (id int primary key, v text); create publication shop for table t")
    database.execute("insert into t select i, 'row ' || i from generate_series(1, 1000) i")
    with pipeline_process(database, tmp_path, verbose=False) as run:
        run.start()
        run.wait_said("public.t: ready", 90)
        up = 'pipeline 1 is up: 1 table of publication "shop", slot headwater_apply_1; Ctrl-C stops it in order'
        assert up in run.output
        assert "WARNING" not in run.output, "Java greets with a warning of a module that Spark asked for"
        with locked_catalog(run.warehouse):
            database.execute("update t set v = 'changed' where id <= 10; delete from t where id > 990")
            run.wait_received()
            run.signal(signal.SIGINT)
            run.wait_said("stopping: the batch under way is written and confirmed first; a second Ctrl-C")
            run.still_running()
        assert run.wait() == 0, run.output
        assert run.output.rstrip().endswith("stopped")
        run.assert_equal("t")


@pytest.mark.promise("buffered writes drain before shutdown")
@pytest.mark.usefixtures("told_often")
def test_a_second_signal_ends_at_once_though_a_batch_is_under_way(database: Database, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key); create publication shop for table t")
    with pipeline_process(database, tmp_path, verbose=False) as run:
        run.start()
        run.wait_said("public.t: ready", 90)
        jvm = run.jvm()
        with locked_catalog(run.warehouse):
            database.execute("insert into t values (1)")
            run.wait_received()
            end = flush_position(database.connection)
            run.signal(signal.SIGTERM)
            run.wait_said("stopping: ")
            run.still_running()
            # The catalog stays locked, so only the second signal can be what ends it.
            run.signal(signal.SIGTERM)
            assert run.wait(30) == 128 + signal.SIGTERM, run.output
        wait_until(lambda: not Path(f"/proc/{jvm}").exists(), 60, what="the JVM to be gone")
        assert confirmed_position(database.connection, apply_slot_name(1)) < end


@pytest.mark.promise("full reset")
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
