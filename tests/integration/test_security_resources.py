"""No more files, no more threads: named and waited for, and never a table's error or a defect (invariant 15).

The limits are the process's own, as the system enforces them.
"""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headwater.errors import (
    ConnectionLost,
    HeadwaterError,
    LimitReached,
    Meaning,
    SpoolError,
    StoreUnavailable,
    meaning,
)
from headwater.source.session import connect
from headwater.store.postgres import PostgresStore
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings
from headwater.wire.spool import Spool
from headwater.wire.tls_config import TlsConfig, TlsMode
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import RunningIntoMemory, running

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES = "this process has reached its limit of open files and sockets"
THREADS = "this process can start no more threads"
STANDARD_FILES = 3
# No system has room for the stack of such a thread.
IMPOSSIBLE_STACK_BYTES = 1 << 46


@contextmanager
def no_more_files() -> Iterator[None]:
    """What is open stays open; nothing can be opened, also where something was closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD_FILES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_more_threads() -> Iterator[None]:
    before = threading.stack_size(IMPOSSIBLE_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """So many can still be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(open_files())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, hard))
    fillers: list[int] = []
    with suppress(OSError):
        while True:
            fillers.append(os.open(os.devnull, os.O_RDONLY))
    try:
        for filler in fillers[len(fillers) - count :]:
            os.close(filler)
        del fillers[len(fillers) - count :]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def end_sessions(database: Database) -> None:
    """All of the pipeline's: lock, store, stream and looks have to be opened again."""
    database.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
        " and pid <> pg_backend_pid() and backend_type in ('client backend', 'walsender')"
    )


@pytest.mark.invariant(15)
@pytest.mark.parametrize(("limited", "told"), [(no_more_files, FILES), (no_more_threads, THREADS)])
def test_a_pipeline_that_reaches_a_limit_waits_and_continues(
    database: Database, limited: Callable[[], Any], told: str
) -> None:
    database.execute("create table orders(id int primary key, n int); create publication shop for table orders")
    database.execute(
        "insert into orders select i, i from generate_series(1, 50) i; create table items(id int primary key)"
    )
    destination = MemoryTables()
    with running(database, destination, PostgresStore(database.settings, 1), heartbeat_interval_ms=200) as run:
        run.wait_states("ready", 1)
        with limited():
            end_sessions(database)
            database.execute("update orders set n = 0 where id < 9; insert into items values (1)")
            database.execute("alter publication shop add table items")
            run.wait_for(lambda: told in str(run.pipeline.progress.snapshot().waiting))
            outlast(run, 3)
        run.wait_states("ready", 2)
        database.execute("delete from orders where id = 20; insert into items values (2)")
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert destination.copies.count("orders") == 1
        assert not any("errored" in error or "defect" in error for error in run.pipeline.progress.snapshot().errors)
        run.stop()


@pytest.mark.invariant(15)
@pytest.mark.parametrize("limited", [no_more_files, no_more_threads])
def test_a_copy_and_a_write_that_reach_a_limit_begin_again(database: Database, limited: Callable[[], Any]) -> None:
    """Reached while a copy is under way and its sessions are open, then while a batch is."""
    database.execute("create table orders(id int primary key, n int); create publication shop for table orders")
    database.execute("insert into orders select i, i from generate_series(1, 50) i")
    destination = MemoryTables()
    entered, released = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        if not entered.is_set():
            entered.set()
            assert released.wait(60)

    destination.after_copy = hold
    with running(database, destination, PostgresStore(database.settings, 1)) as run:
        run.wait_for(entered.is_set)
        with limited():
            released.set()
            end_sessions(database)
            outlast(run, 2)
        run.wait_states("ready", 1)
        entered.clear()
        released.clear()
        destination.before_events = hold
        database.execute("update orders set n = 0")
        run.wait_for(entered.is_set)
        with limited():
            end_sessions(database)
            released.set()
            outlast(run, 2)
        run.wait_caught_up()
        run.assert_equal("orders")
        assert not any("errored" in error or "defect" in error for error in run.pipeline.progress.snapshot().errors)
        run.stop()


def outlast(run: RunningIntoMemory, seconds: float) -> None:
    """Several attempts of every thread are made, and the run goes on: nothing tells when the last of them has had its turn."""
    assert not run.pipeline.wait(seconds)


def error_of(work: Callable[[], object]) -> HeadwaterError | None:
    try:
        work()
    except HeadwaterError as error:
        return error
    return None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("way", [connect, WireConnection.connect])
def test_a_session_opens_or_names_the_limit_however_many_files_are_left_and_leaves_none_open(
    database: Database, way: Callable[[ConnectSettings], Any], host: str
) -> None:
    settings = replace(database.settings, host=host)
    way(settings).close()
    socket.getaddrinfo("localhost", 1)
    # What earlier tests left to the collector is not ours to count.
    gc.collect()
    before = open_files()
    outcomes = []
    for left in range(24):
        with files_left(left):
            error = error_of(lambda: way(settings).close())
        outcomes.append(error is None)
        if error is not None:
            # Open already, and then nothing to wait with: a session that was lost, which says why.
            was_lost = isinstance(error, ConnectionLost) and FILES in error.detail
            assert isinstance(error, LimitReached) or was_lost, error
            assert meaning(error) is Meaning.WAIT
        del error
        gc.collect()
        assert open_files() - before == set()
    # Not in order for certain: other threads of the test process open and close files too.
    assert False in outcomes
    assert outcomes[-1] is True


@pytest.mark.parametrize("way", [connect, WireConnection.connect])
def test_the_limit_is_named_with_what_to_raise(database: Database, way: Callable[[ConnectSettings], Any]) -> None:
    with no_more_files(), pytest.raises(LimitReached, match=FILES) as caught:
        way(database.settings)
    assert "ulimit -n" in caught.value.hint
    assert "LimitNOFILE" in caught.value.hint
    assert database.settings.address in caught.value.detail


@pytest.mark.parametrize("way", [connect, WireConnection.connect])
@pytest.mark.parametrize("mode", [TlsMode.PREFER, TlsMode.VERIFY_CA])
def test_certificates_that_cannot_be_opened_for_want_of_files_are_not_wrong_certificates(
    database: Database, tmp_path: Path, way: Callable[[ConnectSettings], Any], mode: TlsMode
) -> None:
    (tmp_path / "roots.pem").write_text("whatever it holds")
    settings = replace(database.settings, tls=TlsConfig(mode=mode, trusted_root_certs=str(tmp_path / "roots.pem")))
    with no_more_files(), pytest.raises(LimitReached, match=FILES):
        way(settings)


def test_a_store_that_cannot_be_opened_for_want_of_files_says_so(database: Database) -> None:
    store = PostgresStore(database.settings, 1)
    with no_more_files(), pytest.raises(StoreUnavailable) as caught:
        store.start()
    store.close()
    assert FILES in caught.value.detail
    assert "ulimit -n" in caught.value.hint


def test_a_large_transaction_that_gets_no_file_says_so(tmp_path: Path) -> None:
    with no_more_files(), pytest.raises(SpoolError) as caught:
        Spool(tmp_path).buffer(10)
    assert meaning(caught.value) is Meaning.WAIT
    assert "ulimit -n" in caught.value.hint


def test_a_thread_that_gets_no_socket_to_the_jvm_waits_and_does_not_take_it_for_gone(spark: SparkSession) -> None:
    """Each thread has a socket of its own to it, opened with its first call."""
    from headwater.spark.errors import jvm_alive, translate

    alive: list[bool] = []
    errors: list[HeadwaterError] = []

    def ask() -> None:
        alive.append(jvm_alive(spark))
        try:
            spark.range(1).count()
        except Exception as error:
            errors.append(translate(error))

    assert jvm_alive(spark)
    with no_more_files():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert alive == [True]
    (error,) = errors
    assert isinstance(error, LimitReached)
    assert jvm_alive(spark)
