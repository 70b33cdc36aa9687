"""A server that does not answer: sockets stay open and nothing comes. It is noticed, logged and waited for at any moment."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.config import PgConnectionConfig
from headwater.contracts.stores import PipelineStore
from headwater.engine.pipeline import Pipeline
from headwater.errors import HeadwaterError
from headwater.events import TableRows
from headwater.source.session import connect
from headwater.source.slots import apply_slot_name
from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from headwater.testing.compare import confirmed_position, flush_position, wait_until
from headwater.wire.connection import WireConnection
from headwater.wire.patience import ServerSilent
from headwater.wire.settings import ConnectSettings
from tests.commands import headwater, write_settings
from tests.conftest import Database
from tests.integration.counter_tables import create_counter_tables
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import RunningIntoMemory, config, running
from tests.integration.silent_proxy import SilentProxy, silent_proxy
from tests.pipeline_process import pipeline_process

ANSWER_MS = 2000
BOUND_SECONDS = 60
"""For a stop. Far from what it takes, near enough to tell it from for ever."""


@pytest.fixture
def shop(database: Database) -> Database:
    create_counter_tables(database, orders=1000, items=10)
    # The stream's bound is the longer of the two.
    database.execute(f'alter database "{database.name}" set wal_sender_timeout = {ANSWER_MS}')
    return database


@pytest.fixture
def proxy(shop: Database) -> Iterator[SilentProxy]:
    with silent_proxy(shop.settings) as proxy:
        yield proxy


def through(proxy: SilentProxy, settings: ConnectSettings) -> PgConnectionConfig:
    return PgConnectionConfig(
        host="127.0.0.1",
        port=proxy.port,
        name=settings.database,
        username=settings.username,
        password=settings.password,
        answer_timeout_ms=ANSWER_MS,
    )


def pipeline_of(
    shop: Database, proxy: SilentProxy, destination: MemoryTables, store: PipelineStore | None = None, **more: Any
) -> Pipeline:
    connection = through(proxy, shop.settings)
    return Pipeline(config(shop, pg_connection=connection, **more), store or MemoryStore(), destination)


@contextmanager
def run_through(shop: Database, proxy: SilentProxy, **more: Any) -> Iterator[RunningIntoMemory]:
    with running(shop, pg_connection=through(proxy, shop.settings), **more) as run:
        yield run


def said_silent(caplog: pytest.LogCaptureFixture) -> bool:
    return "does not answer" in caplog.text and "hint: Look for a proxy" in caplog.text


@pytest.mark.invariant(15)
@pytest.mark.parametrize("new_too", [True, False])
def test_a_stream_that_does_not_answer_is_noticed_and_followed_again(
    shop: Database, proxy: SilentProxy, caplog: pytest.LogCaptureFixture, new_too: bool
) -> None:
    with caplog.at_level(logging.WARNING), run_through(shop, proxy) as run:
        run.wait_states("ready", 2)
        run.wait_caught_up()
        proxy.silence(new_too=new_too)
        shop.execute("update orders set counter = 2")
        run.wait_for(lambda: 'replication slot "headwater_apply_1"' in caplog.text)
        assert said_silent(caplog)
        proxy.resume()
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert set(run.states().values()) == {"ready"}


def test_lag_grows_while_the_source_is_silent_and_the_display_says_so(shop: Database, proxy: SilentProxy) -> None:
    with run_through(shop, proxy) as run:
        run.wait_states("ready", 2)
        run.wait_caught_up()
        proxy.silence()
        progress = run.pipeline.progress
        run.wait_for(lambda: (progress.snapshot().no_contact_seconds or 0.0) > 6.0)
        snapshot = progress.snapshot()
        assert snapshot.lag_seconds >= 6.0
        proxy.resume()
        run.wait_for(lambda: progress.snapshot().no_contact_seconds is None)
        run.wait_for(lambda: progress.snapshot().lag_seconds == 0.0)


@pytest.mark.invariant(6)
def test_the_lock_of_a_silent_session_is_taken_again_and_nothing_is_written_meanwhile(
    shop: Database, proxy: SilentProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """New connections work: the old session lives on at the server, with the lock."""
    pid = (
        "select pid from pg_stat_activity where application_name = 'headwater_lock_1' and datname = current_database()"
    )
    with caplog.at_level(logging.WARNING), run_through(shop, proxy) as run:
        run.wait_states("ready", 2)
        (before,) = shop.execute(pid)
        proxy.silence(new_too=False)
        run.wait_for(lambda: shop.execute(pid) not in ([], [before]))
        run.wait_for(lambda: "was lost and is held again" in caplog.text)
        shop.execute("update orders set counter = 2")
        run.wait_caught_up()
        run.assert_equal("orders", "items")


@pytest.mark.invariant(6)
def test_nothing_is_written_while_the_lock_cannot_be_verified(shop: Database, proxy: SilentProxy) -> None:
    with run_through(shop, proxy) as run:
        run.wait_states("ready", 2)
        lock = run.pipeline._lock
        proxy.silence()
        run.wait_for(lambda: not lock.is_held)
        batches = len(run.destination.batches)
        shop.execute("update orders set counter = 2")
        run.wait_for(lambda: (run.pipeline.progress.snapshot().no_contact_seconds or 0.0) > 8.0)
        assert len(run.destination.batches) == batches
        proxy.resume()
        run.wait_caught_up()
        run.assert_equal("orders", "items")


@pytest.mark.parametrize("new_too", [True, False])
def test_a_stop_ends_in_bounded_time_while_the_server_is_silent_and_the_next_run_goes_on(
    shop: Database, proxy: SilentProxy, new_too: bool
) -> None:
    destination, store = MemoryTables(), MemoryStore()
    pipeline = pipeline_of(shop, proxy, destination, store)
    pipeline.start()
    run = RunningIntoMemory(shop, pipeline, destination)
    run.wait_states("ready", 2)
    proxy.silence(new_too=new_too)
    shop.execute("update orders set counter = 2")
    pipeline.shutdown()
    assert pipeline.wait(BOUND_SECONDS)
    proxy.resume()
    with run_through(shop, proxy, destination=destination, store=store) as again:
        again.wait_caught_up()
        again.assert_equal("orders", "items")


COPY_MARKS = {
    "the lock of the tables": b"LOCK TABLE",
    "the slot": b"(SNAPSHOT 'export')",
    "the session at the snapshot": b"SET TRANSACTION SNAPSHOT",
    "the rows": b"COPY (SELECT",
    "the hand-off": b'START_REPLICATION SLOT "headwater_sync',
}


@pytest.mark.parametrize("passes", [True, False], ids=["sent", "unsent"])
@pytest.mark.parametrize("moment", COPY_MARKS)
def test_a_copy_whose_server_stops_answering_starts_again_when_it_answers(
    shop: Database, proxy: SilentProxy, caplog: pytest.LogCaptureFixture, moment: str, passes: bool
) -> None:
    with caplog.at_level(logging.WARNING), run_through(shop, proxy, publication="shop") as run:
        run.wait_states("ready", 2)
        shop.execute("create table late(id int primary key, counter int not null)")
        shop.execute("insert into late select i, 1 from generate_series(1, 100) i")
        proxy.silence_at(COPY_MARKS[moment], passes=passes)
        shop.execute("alter publication shop add table late")
        assert proxy.silenced.wait(30)
        run.wait_for(lambda: said_silent(caplog))
        proxy.resume()
        run.wait_states("ready", 3)
        shop.execute("update late set counter = 2")
        run.wait_caught_up()
        run.assert_equal("orders", "items", "late")


def test_a_copy_that_stops_in_the_middle_of_its_rows_starts_again(
    shop: Database, proxy: SilentProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections that are made anew work, so that only the server can tell that what it sends does not arrive."""
    destination = MemoryTables()
    fell = threading.Event()

    def fall(rows: TableRows) -> None:
        if not fell.is_set():
            fell.set()
            proxy.silence(new_too=False)

    destination.during_copy = fall
    shop.execute("create table large(id int primary key, counter int, filler text not null)")
    shop.execute("insert into large select i, 1, repeat('x', 1000) from generate_series(1, 60000) i")
    shop.execute("alter publication shop set table large")
    with caplog.at_level(logging.WARNING), run_through(shop, proxy, destination=destination) as run:
        run.wait_for(fell.is_set)
        run.wait_states("ready", 1)
        run.assert_equal("large")
    assert said_silent(caplog)


START_MARKS = [b"pg_advisory_lock", b"pg_publication", b"IDENTIFY_SYSTEM", b"CREATE_REPLICATION_SLOT"]


@pytest.mark.parametrize("passes", [True, False], ids=["sent", "unsent"])
@pytest.mark.parametrize("mark", START_MARKS, ids=lambda mark: mark.decode().lower())
def test_a_start_that_meets_silence_fails_with_a_hint_and_the_next_one_works(
    shop: Database, proxy: SilentProxy, mark: bytes, passes: bool
) -> None:
    destination, store = MemoryTables(), PostgresStore(shop.settings, 1)
    proxy.silence_at(mark, passes=passes)
    with pytest.raises(HeadwaterError) as caught:
        pipeline_of(shop, proxy, destination, store).start()
    assert proxy.silenced.is_set()
    assert caught.value.hint
    proxy.resume()
    wait_until(lambda: not shop.execute("select from pg_stat_activity where application_name = 'headwater_lock_1'"), 30)
    with run_through(shop, proxy, destination=destination, store=PostgresStore(shop.settings, 1)) as run:
        run.wait_states("ready", 2)
        run.assert_equal("orders", "items")


@pytest.mark.parametrize("mark", START_MARKS, ids=lambda mark: mark.decode().lower())
def test_a_stop_during_a_start_ends_it_without_an_error(shop: Database, proxy: SilentProxy, mark: bytes) -> None:
    connection = replace(through(proxy, shop.settings), answer_timeout_ms=120_000)
    pipeline = Pipeline(config(shop, pg_connection=connection), MemoryStore(), MemoryTables())
    proxy.silence_at(mark)
    starting = threading.Thread(target=pipeline.start)
    starting.start()
    assert proxy.silenced.wait(30)
    pipeline.shutdown()
    starting.join(BOUND_SECONDS)
    assert not starting.is_alive()
    assert pipeline.wait(BOUND_SECONDS)


def test_a_slot_that_waits_for_an_open_transaction_is_waited_for_and_a_stop_ends_that(shop: Database) -> None:
    connection = replace(config(shop).pg_connection, answer_timeout_ms=1000)
    waiting = "select from pg_stat_activity where query like 'CREATE_REPLICATION_SLOT%' and state = 'active'"
    pipeline = Pipeline(config(shop, pg_connection=connection), MemoryStore(), MemoryTables())
    with shop.connect() as other:
        other.execute("begin; select pg_current_xact_id()")
        failed: list[BaseException] = []

        def start() -> None:
            try:
                pipeline.start()
            except BaseException as error:
                failed.append(error)

        starting = threading.Thread(target=start)
        starting.start()
        wait_until(lambda: bool(shop.execute(waiting)), 30, what="the slot to wait")
        # Several times as long as an answer may take.
        starting.join(4)
        assert starting.is_alive()
        pipeline.shutdown()
        starting.join(BOUND_SECONDS)
        assert not starting.is_alive()
        assert not failed
        wait_until(lambda: not shop.execute(waiting), 30, what="the slot to be given up")


@pytest.mark.invariant(15)
@pytest.mark.parametrize("new_too", [True, False])
def test_a_store_that_does_not_answer_is_waited_for_and_no_table_is_marked_failed(
    shop: Database, proxy: SilentProxy, caplog: pytest.LogCaptureFixture, new_too: bool
) -> None:
    store = PostgresStore(replace(proxy.before(shop.settings), answer_timeout_seconds=2, connect_timeout_seconds=2), 1)
    with caplog.at_level(logging.WARNING), running(shop, store=store) as run:
        run.wait_states("ready", 2)
        proxy.silence(new_too=new_too)
        # An idle position may still be confirmed, up to here.
        before = flush_position(shop.connection)
        shop.execute("update orders set counter = 2")
        run.wait_for(lambda: said_silent(caplog))
        if new_too:
            run.wait_for(lambda: "recording progress failed" in caplog.text)
            assert confirmed_position(shop.connection, apply_slot_name(1)) <= before
            proxy.resume()
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert set(run.states().values()) == {"ready"}


def test_a_stop_ends_in_bounded_time_while_the_store_is_silent(shop: Database, proxy: SilentProxy) -> None:
    store, destination = PostgresStore(proxy.before(shop.settings), 1), MemoryTables()
    pipeline = Pipeline(config(shop), store, destination)
    pipeline.start()
    run = RunningIntoMemory(shop, pipeline, destination)
    run.wait_states("ready", 2)
    proxy.silence()
    shop.execute("update orders set counter = 2")
    run.wait_for(lambda: bool(destination.batches))
    pipeline.shutdown()
    assert pipeline.wait(BOUND_SECONDS)


COMMANDS = {
    "tables": b"pg_publication",
    "rollback public.orders": b"pg_publication",
    "resync public.orders": b"table_states",
    "resync --all": b"CREATE_REPLICATION_SLOT",
    "remove --yes": b"pg_advisory_lock",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_not_hang_if_the_server_does_not_answer(
    shop: Database, proxy: SilentProxy, tmp_path: Path, command: str
) -> None:
    file = write_settings(shop, tmp_path)
    text = file.read_text().replace(f"port = {shop.settings.port}", f"port = {proxy.port}\nanswer_timeout_ms = 2000")
    file.write_text(text)
    proxy.silence_at(COMMANDS[command])
    name, *rest = command.split()
    said = headwater(name, file, *rest, status=1)
    assert "does not answer" in said
    assert "hint:" in said


# `headwater run`, with Spark


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_driver_lives_through_silence_in_the_middle_of_a_copy_and_a_sigterm_ends_it_at_a_silent_server(
    shop: Database, proxy: SilentProxy, tmp_path: Path
) -> None:
    """The executors' sessions are in processes of their own, which know nothing of the pipeline."""
    with pipeline_process(shop, tmp_path) as run:
        run.connect_through(proxy.port, "answer_timeout_ms = 4000")
        shop.execute("insert into orders select i, 1 from generate_series(1001, 300000) i")
        proxy.silence_at(b"COPY (SELECT")
        run.start()
        assert proxy.silenced.wait(120), run.output
        run.wait_said("does not answer", 120)
        proxy.resume()
        run.wait_ready(2)
        shop.execute("update items set counter = 2")
        run.wait_caught_up()
        proxy.silence()
        shop.execute("update items set counter = 3")
        assert run.stop() == 0, run.output
        proxy.resume()
        run.start()
        run.wait_caught_up()
        assert run.stop() == 0, run.output
        run.assert_equal("orders", "items")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sigterm_ends_a_driver_whose_executors_wait_for_a_silent_server(
    shop: Database, proxy: SilentProxy, tmp_path: Path
) -> None:
    with pipeline_process(shop, tmp_path) as run:
        run.connect_through(proxy.port)
        shop.execute("insert into orders select i, 1 from generate_series(1001, 300000) i")
        proxy.silence_at(b"COPY (SELECT")
        run.start()
        assert proxy.silenced.wait(120), run.output
        assert run.stop() == 0, run.output
        proxy.resume()
        run.start()
        run.wait_ready(2)
        assert run.stop() == 0, run.output
        run.assert_equal("orders", "items")


# Server processes that hang


@contextmanager
def hanging(shop: Database, application_name: str) -> Iterator[None]:
    query = "select pid from pg_stat_activity where application_name = %s and datname = current_database()"
    pid = int(shop.value(query, [application_name]))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("session", ["headwater_apply_1", "headwater_lock_1", "headwater_store_1"])
def test_a_server_process_that_hangs_is_noticed_and_waited_out(
    shop: Database, proxy: SilentProxy, caplog: pytest.LogCaptureFixture, session: str
) -> None:
    store = PostgresStore(replace(shop.settings, answer_timeout_seconds=2), 1)
    with caplog.at_level(logging.WARNING), run_through(shop, proxy, store=store) as run:
        run.wait_states("ready", 2)
        run.wait_caught_up()
        with hanging(shop, session):
            shop.execute("update orders set counter = 2")
            run.wait_for(lambda: said_silent(caplog))
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert set(run.states().values()) == {"ready"}


@pytest.mark.parametrize("session", ["headwater_apply_1", "headwater_lock_1", "headwater_store_1"])
def test_a_stop_does_not_wait_for_a_server_process_that_hangs(shop: Database, session: str) -> None:
    destination = MemoryTables()
    pipeline = Pipeline(config(shop), PostgresStore(shop.settings, 1), destination)
    pipeline.start()
    RunningIntoMemory(shop, pipeline, destination).wait_states("ready", 2)
    with hanging(shop, session):
        shop.execute("update orders set counter = 2")
        pipeline.shutdown()
        assert pipeline.wait(BOUND_SECONDS)


# Single sessions


def patient(settings: ConnectSettings, seconds: float = 1.0) -> ConnectSettings:
    return replace(settings, answer_timeout_seconds=seconds, connect_timeout_seconds=2)


def test_a_statement_that_works_for_long_is_no_silence(pg: ConnectSettings) -> None:
    with connect(patient(pg)) as session:
        assert session.execute("select pg_sleep(3)::text, 1").fetchone() == ("", 1)
    with WireConnection.connect(patient(pg)) as wire:
        assert wire.query("select 7 as n from pg_sleep(3)", waits=True) == [{"n": "7"}]
        chunks = list(wire.copy_out("copy (select pg_sleep(3)) to stdout"))
        assert len(chunks) == 1


def test_a_lock_that_is_waited_for_is_no_silence(database: Database) -> None:
    database.execute("create table held(id int)")
    with database.connect() as other, connect(patient(database.settings)) as session:
        other.execute("begin; lock table held")
        release = threading.Timer(3, lambda: other.execute("commit"))
        release.start()
        session.execute("select count(*) from public.held")
        release.join()


@pytest.mark.parametrize("new_too", [True, False])
def test_a_session_whose_answer_does_not_come_is_left(pg: ConnectSettings, new_too: bool) -> None:
    with silent_proxy(pg) as proxy:
        settings = patient(proxy.before(pg))
        session = connect(settings)
        wire = WireConnection.connect(settings)
        proxy.silence(new_too=new_too)
        with pytest.raises(Exception, match="does not answer"):
            session.execute("select 1")
        assert session.closed
        with pytest.raises(ServerSilent):
            wire.query("select 1", waits=True)
        assert wire.closed
