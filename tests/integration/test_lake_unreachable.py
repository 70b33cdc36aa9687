"""A lake that is unreachable (moved, read-only, its catalog down) is waited for, for as long as it takes (invariant 15)."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from headwater.config import CatalogConfig, CatalogType
from headwater.engine import retry
from headwater.errors import DestinationError, DestinationUnavailable
from headwater.secret import Secret
from headwater.spark.errors import translate
from tests.conftest import Database
from tests.integration.counter_tables import create_counter_tables
from tests.integration.lake_pipeline import RunningIntoLake, running_into_lake

# A Spark job that fails leaves the socket open that its rows would have come through; Python says so when it is collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

ATTEMPTS = 4
"""More than a table's error is given by the setting that these tests lower."""


@pytest.fixture
def shop(database: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    monkeypatch.setattr(retry, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(retry, "MOST_SECONDS", 0.2)
    create_counter_tables(database, orders=100, items=10)
    return database


@contextmanager
def moved_away(warehouse: Path) -> Iterator[None]:
    away = warehouse.with_name("away")
    warehouse.rename(away)
    # A file in its place, so that nothing can be made where the lake was.
    warehouse.touch()
    try:
        yield
    finally:
        warehouse.unlink()
        away.rename(warehouse)


def wait_out(
    run: RunningIntoLake, caplog: pytest.LogCaptureFixture, cause: str, changes: Callable[[], object], *, attempts: int
) -> None:
    """While nothing can be written: its root cause is logged once for each attempt, and the lag grows."""
    caplog.clear()
    changes()
    run.wait_for(lambda: caplog.text.count("writing a batch failed, retrying") >= attempts, 120)
    now = run.pipeline.progress.snapshot()
    assert now.waiting is not None
    assert cause in now.waiting, now.waiting
    assert now.lag_bytes > 0
    assert now.lag_seconds > 0
    assert set(run.states().values()) == {"ready"}
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == caplog.text.count("writing a batch failed, retrying"), caplog.text
    assert all(cause in record.getMessage() for record in lines), caplog.text


def go_on(run: RunningIntoLake, caplog: pytest.LogCaptureFixture) -> None:
    run.wait_caught_up()
    run.wait_for(lambda: run.pipeline.progress.snapshot().waiting is None)
    assert caplog.text.count("writing a batch succeeded after") == 1
    assert set(run.states().values()) == {"ready"}


@pytest.mark.invariant(15)
def test_a_warehouse_that_is_moved_away_twice_is_waited_for_beyond_every_limit(
    shop: Database, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_into_lake(shop, spark, tmp_path, table_error_retry_max_attempts=2) as run:
        run.wait_ready(2)
        run.wait_caught_up()
        for counter in (2, 3):
            with moved_away(run.warehouse):
                wait_out(
                    run,
                    caplog,
                    str(run.warehouse),
                    partial(shop.execute, f"update orders set counter = {counter}; delete from items"),
                    attempts=ATTEMPTS,
                )
            # The second time it goes away as soon as it is back, with changes still to be written.
        go_on(run, caplog)
        run.assert_equal("orders", "items")


@contextmanager
def catalog_down(file: Path) -> Iterator[None]:
    away = file.with_name("away.db")
    file.rename(away)
    file.mkdir()
    try:
        yield
    finally:
        file.rmdir()
        away.rename(file)


@contextmanager
def read_only(warehouse: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", str(warehouse)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(warehouse)], check=True)


@contextmanager
def mounted(warehouse: Path) -> Iterator[None]:
    warehouse.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", str(warehouse)], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(warehouse)], check=True)


@pytest.mark.invariant(15)
def test_a_read_only_warehouse_and_a_catalog_that_is_down_are_waited_for_and_named(
    shop: Database, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The catalog's file is held open: in the warehouse it would keep that from becoming read-only.
    catalog = tmp_path / "catalog.db"
    elsewhere = CatalogConfig(
        type=CatalogType.JDBC, uri=f"jdbc:sqlite:file:{catalog}", properties={"jdbc.schema-version": Secret("V1")}
    )
    with (
        mounted(tmp_path / "lake"),
        running_into_lake(shop, spark, tmp_path, catalog=elsewhere, table_error_retry_max_attempts=2) as run,
    ):
        run.wait_ready(2)
        run.wait_caught_up()
        with read_only(run.warehouse):
            change = "update orders set counter = 2"
            wait_out(run, caplog, "Read-only file system", lambda: shop.execute(change), attempts=ATTEMPTS)
        go_on(run, caplog)
        with catalog_down(catalog):
            change = "update orders set counter = 3 where id > 50; delete from items where id = 1"
            wait_out(run, caplog, "SQLITE_", lambda: shop.execute(change), attempts=ATTEMPTS)
        go_on(run, caplog)
        for table in ("orders", "items"):
            rows = run.session.sql(f"select id, counter from lake.public.{table}").collect()
            assert sorted(map(tuple, rows)) == sorted(shop.execute(f"select id, counter from {table}"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_outage_of_fifteen_minutes_and_another_during_the_recovery_end_equal(
    shop: Database,
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "FIRST_SECONDS", 0.5)
    monkeypatch.setattr(retry, "MOST_SECONDS", 30.0)
    with running_into_lake(shop, spark, tmp_path) as run:
        run.wait_ready(2)
        run.wait_caught_up()
        with moved_away(run.warehouse):
            until = time.monotonic() + 15 * 60
            number = 1
            while time.monotonic() < until:
                number += 1
                shop.execute("update orders set counter = %s where id %% 7 = %s", [number, number % 7])
                threading.Event().wait(1.0)  # the minutes themselves are what is promised
            now = run.pipeline.progress.snapshot()
            assert now.lag_seconds > 14 * 60
            assert str(run.warehouse) in (now.waiting or "")
        assert caplog.text.count("writing a batch failed, retrying") < 60
        with moved_away(run.warehouse):
            wait_out(run, caplog, str(run.warehouse), lambda: shop.execute("delete from items"), attempts=1)
        go_on(run, caplog)
        run.assert_equal("orders", "items")


def test_the_classes_of_the_causes_tell_a_lake_that_is_unreachable_from_one_that_refuses(
    spark: SparkSession, tmp_path: Path
) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None

    def met(work: Callable[[], object]) -> DestinationError:
        with pytest.raises(Py4JJavaError) as raised:
            work()
        found = translate(raised.value)
        assert isinstance(found, DestinationError)
        return found

    def sqlite(path: Path) -> object:
        driver = jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass("org.sqlite.JDBC").newInstance()
        connection = driver.connect(f"jdbc:sqlite:{path}", jvm.java.util.Properties())
        return connection.createStatement().execute("select * from somewhere")

    (tmp_path / "directory").mkdir()
    unreachable: dict[str, Callable[[], object]] = {
        "Connection refused": lambda: jvm.java.net.Socket("127.0.0.1", 1),
        "SQLITE_CANTOPEN": lambda: sqlite(tmp_path / "directory"),
        "No such file": lambda: jvm.java.io.FileInputStream(str(tmp_path / "nothing")),
        "NotDirectory": lambda: jvm.java.nio.file.Files.list(jvm.java.io.File(__file__).toPath()),
    }
    for cause, work in unreachable.items():
        found = met(work)
        assert type(found) is DestinationUnavailable, found
        assert cause in found.detail or cause in str(found), found
    refused = met(lambda: sqlite(tmp_path / "catalog.db"))
    assert type(refused) is DestinationError
    assert "no such table: somewhere" in refused.detail
