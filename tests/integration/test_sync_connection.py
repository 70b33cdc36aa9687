"""A connection lost between the end of a copy and its hand-off costs no second copy and does not block other tables for ever."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from headwater.engine import retry
from headwater.engine.follow import slot_stream
from headwater.engine.follow.slot_stream import StreamOptions
from headwater.engine.table_sync import slot as sync_slot_module
from headwater.errors import ConnectError, ConnectionLost
from headwater.events import TableRows
from headwater.lsn import ZERO
from headwater.source.slots import apply_slot_name
from headwater.testing.postgres import PostgresServer
from headwater.wire.chunks import Chunk
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings
from tests.conftest import Database
from tests.integration.blocking_destination import BlockingDestination, create_tables, wait_for_hand_off_request
from tests.integration.running_pipeline import RunningIntoMemory, running, sync_slot


def end_session(database: Database, run: RunningIntoMemory, slot: str) -> None:
    """The walsender that serves the slot is gone, for good."""
    assert database.execute(
        "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", [slot]
    )
    run.wait_for(lambda: not database.value("select active from pg_replication_slots where slot_name = %s", [slot]))


def end_session_for_all_to_see(
    database: Database, run: RunningIntoMemory, slot: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the worker knows: whatever it has read and not written is dropped."""
    end_session(database, run, slot)
    run.wait_for(lambda: "following the slot of the copy" in caplog.text)


def wait_equal(run: RunningIntoMemory) -> None:
    """Both tables are handed over, and what was written by now is in the destination."""
    run.wait_states("ready", 2)
    run.wait_caught_up()
    run.assert_equal("first", "second")


def second_slot(database: Database) -> str:
    return sync_slot(database, database.value("select 'second'::regclass::oid::bigint"))


def until_following(database: Database, run: RunningIntoMemory, destination: BlockingDestination) -> None:
    """The second table is copied, and what came after that, too much to ask at once, is being written."""
    run.wait_states("ready", 1)

    def write(rows: TableRows) -> None:
        # In many transactions: in the middle of a single one the server's position says that we are close.
        for number in range(20):
            query = "insert into second select i, 1 from generate_series(%s::int, %s::int) i"
            database.execute(query, [1 + number * 2000, (number + 1) * 2000])

    destination.after_copy = write
    database.execute("alter publication shop add table second")
    destination.wait_blocked("second")


@pytest.mark.promise("after a lost walsender nothing is lost and nothing written twice")
@pytest.mark.usefixtures("first")
def test_a_connection_lost_between_a_copy_and_its_changes_costs_no_copy(database: Database) -> None:
    ended: list[bool] = []

    def end_walsender(rows: TableRows) -> None:
        query = "select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name = %s and backend_type = %s"
        with database.connect() as other:
            ended.extend(found for (found,) in other.execute(query, [second_slot(database), "walsender"]))

    with running(database) as run:
        run.wait_states("ready", 1)
        run.destination.after_copy = end_walsender
        database.execute("alter publication shop add table second")
        run.wait_states("ready", 2)
        assert ended == [True]
        database.execute("insert into second values (1, 1)")
        run.wait_caught_up()
        run.assert_equal("first", "second")
        assert run.destination.copies == ["first", "second"]


@pytest.mark.promise("after a lost walsender nothing is lost and nothing written twice")
@pytest.mark.usefixtures("first")
def test_a_connection_lost_while_a_copy_is_followed_costs_no_copy(database: Database) -> None:
    destination = BlockingDestination("second")
    with running(database, destination) as run:
        until_following(database, run, destination)
        assert run.states()["public.second"] == "finished_copy"
        database.execute("insert into second values (0, 1)")
        end_session(database, run, second_slot(database))
        destination.allow("second", 100)
        wait_equal(run)
        assert destination.copies == ["first", "second"]


@pytest.mark.promise("after a lost walsender nothing is lost and nothing written twice")
@pytest.mark.usefixtures("first")
def test_a_connection_lost_while_the_hand_off_is_waited_for_costs_no_copy(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    destination = BlockingDestination("first")
    with running(database, destination) as run:
        wait_for_hand_off_request(database, run, destination)
        end_session_for_all_to_see(database, run, second_slot(database), caplog)
        destination.allow("first", 100)
        wait_equal(run)
        assert destination.copies == ["first", "second"]


@pytest.mark.promise("after a lost walsender nothing is lost and nothing written twice")
@pytest.mark.usefixtures("first")
def test_a_slot_dropped_while_a_copy_is_followed_begins_the_copy_again(database: Database) -> None:
    destination = BlockingDestination("second")
    with running(database, destination) as run:
        until_following(database, run, destination)
        destination.after_copy = lambda rows: None
        end_session(database, run, second_slot(database))
        database.execute("select pg_drop_replication_slot(%s)", [second_slot(database)])
        database.execute("insert into second values (0, 1)")
        destination.allow("second", 100)
        run.wait_for(lambda: destination.copies == ["first", "second", "second"])
        wait_equal(run)


@pytest.mark.promise("catching up that fails does not stop the apply worker")
@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("fault", ["WireConnection", "SlotStream"])
def test_a_worker_that_cannot_connect_again_or_loses_each_connection_does_not_hold_the_others_up_for_ever(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    destination = BlockingDestination("first")
    with running(database, destination) as run:
        wait_for_hand_off_request(database, run, destination)
        with monkeypatch.context() as patched:
            module, instead = {
                "WireConnection": (sync_slot_module, Unreachable),
                "SlotStream": (slot_stream, BreakingForTableSync),
            }[fault]
            patched.setattr(module, fault, instead)
            end_session_for_all_to_see(database, run, second_slot(database), caplog)
            destination.allow("first", 100)
            run.wait_for(lambda: run.states()["public.second"] == "init")
            database.execute("insert into first values (3, 1)")
            run.wait_for(lambda: 3 in destination.tables["first"])
        wait_equal(run)


class Unreachable:
    @staticmethod
    def connect(settings: ConnectSettings, **options: object) -> None:
        raise ConnectError("no way there", hint="Wait.")


class BreakingForTableSync(slot_stream.SlotStream):
    """Is made, and breaks before anything has come."""

    looks = 0

    def __init__(self, connection: WireConnection, slot: str, *rest: Any) -> None:
        super().__init__(connection, slot, *rest)
        self._breaks = slot != apply_slot_name(1)

    def take(self) -> list[Chunk]:
        if not self._breaks:
            return super().take()
        self.looks += 1
        if self.looks > 1:
            raise ConnectionLost("broken", hint="Wait.")
        return []


@pytest.mark.promise("catching up that fails does not stop the apply worker")
@pytest.mark.usefixtures("first")
def test_a_worker_that_waits_to_connect_again_connects_as_soon_as_it_is_waited_for(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The server was away for long: the next attempt lies far ahead.
    monkeypatch.setattr(retry, "FIRST_SECONDS", 600.0)
    monkeypatch.setattr(retry, "MOST_SECONDS", 600.0)
    destination = BlockingDestination("first")
    with running(database, destination) as run:
        wait_for_hand_off_request(database, run, destination)
        end_session_for_all_to_see(database, run, second_slot(database), caplog)
        destination.allow("first", 100)
        wait_equal(run)
        assert destination.copies == ["first", "second"]


@pytest.mark.promise("catching up that fails does not stop the apply worker")
@pytest.mark.usefixtures("first")
def test_a_slot_that_a_lost_session_still_holds_is_no_error_of_the_table(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_taken = threading.Event()

    class ConnectsAfterwards:
        @staticmethod
        def connect(settings: ConnectSettings, **options: Any) -> WireConnection:
            assert is_taken.wait(60)
            return WireConnection.connect(settings, **options)

    destination = BlockingDestination("first")
    with running(database, destination) as run:
        wait_for_hand_off_request(database, run, destination)
        monkeypatch.setattr(sync_slot_module, "WireConnection", ConnectsAfterwards)
        slot = second_slot(database)
        settings = replace(database.settings, application_name=slot)
        with WireConnection.connect(settings, replication=True) as stale:
            end_session(database, run, slot)
            options = StreamOptions("shop", True, 10.0).for_server()
            stale.start_replication(slot, ZERO, options, status_interval_seconds=10.0)
            is_taken.set()
            destination.allow("first", 100)
            run.wait_for(lambda: run.states()["public.second"] in ("init", "errored"))
            assert run.states()["public.second"] == "init"
        wait_equal(run)


@pytest.mark.promise("catching up that fails does not stop the apply worker")
@pytest.mark.usefixtures("observed_apply_worker")
def test_a_worker_that_waits_for_an_answer_does_not_keep_the_server_from_stopping() -> None:
    """A server stops when all it has sent is confirmed, the apply worker answers only with a server, and we confirm only then."""
    destination = BlockingDestination("first")
    with PostgresServer.start() as server:
        with server.connect() as connection:
            database = Database(server, "postgres", connection)
            create_tables(database)
            with running(database, destination) as run:
                run.wait_states("ready", 1)
                destination.after_copy = lambda rows: database.execute(
                    "insert into second select i, 1 from generate_series(100, 30000) i"
                )
                wait_for_hand_off_request(database, run, destination)
                end_session(database, run, apply_slot_name(1))
                server.stop()
                destination.after_copy = lambda rows: None
                server.restart()
                destination.allow("first", 100)
                run.wait_states("ready", 2)
                with server.connect() as again:
                    run.database = Database(server, "postgres", again)
                    run.wait_caught_up()
                    run.assert_equal("first", "second")
        assert destination.copies == ["first", "second"]
