"""The hand-off beside tables that are followed already: it holds their changes up as little as it can, and says how long."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from headwater.config import BatchConfig
from headwater.contracts.results import WriteEventsResult
from headwater.contracts.stores import APPLY, WorkerType
from headwater.engine import pipeline, slot_stream, sync_follow, sync_stream, table_sync
from headwater.engine.apply_worker import ApplyWorker
from headwater.engine.retry import Backoff
from headwater.engine.run import Run
from headwater.engine.slot_stream import StreamOptions
from headwater.engine.sync_follow import SyncFollow
from headwater.errors import ConnectError, ConnectionLost, StoreUnavailable
from headwater.events import EventBatch, TableRows
from headwater.lsn import ZERO, EndLsn
from headwater.schema.table import TableId
from headwater.source.slots import apply_slot_name, sync_slot_name
from headwater.store.memory import MemoryStore
from headwater.testing.compare import flush_position
from headwater.testing.postgres import PostgresServer
from headwater.wire.chunks import Chunk
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings
from tests.conftest import Database
from tests.integration.mirror import MirrorDestination, Running, running
from tests.integration.small_tables import Gate, make_tables, writing

TABLES = 8


class Doors(MirrorDestination):
    """Holds the changes of tables until a test lets a write of theirs through."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._through = {name: threading.Semaphore(0) for name in names}
        self.begun = {name: threading.Semaphore(0) for name in names}

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        def write() -> None:
            for name in names:
                self.begun[name].release()
                assert self._through[name].acquire(timeout=60)
            super(Doors, self).write_events(events, result)

        names = {steps[-1].schema.name.name for steps in events.tables.values()} & self._through.keys()
        threading.Thread(target=write, name="doors").start()

    def let_through(self, name: str, writes: int = 1) -> None:
        self._through[name].release(writes)

    def wait_begun(self, name: str) -> None:
        assert self.begun[name].acquire(timeout=60)


class Seen(ApplyWorker):
    """Lets a test see what the apply worker has read and not handed on."""

    newest: Seen

    def __init__(self, run: Run, start: EndLsn) -> None:
        super().__init__(run, start)
        Seen.newest = self

    @classmethod
    def has_read_past(cls, position: int) -> bool:
        end = cls.newest._decoder.end_position
        return end is not None and end.value > position


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "ApplyWorker", Seen)


@pytest.fixture
def first(database: Database) -> None:
    """A table that is followed before others come."""
    make_first(database)


def make_first(database: Database) -> None:
    for name in ("first", "second"):
        database.execute(f"create table {name}(id int primary key, counter int not null)")
    database.execute("create publication shop for table first")


def until_asked(database: Database, run: Running, doors: Doors) -> None:
    """The first table's changes are being written, more of them wait, and the second one asks for its hand-off."""
    run.wait_states("ready", 1)
    database.execute("insert into first values (1, 1)")
    doors.wait_begun("first")
    database.execute("alter publication shop add table second")
    run.wait_for(lambda: run.states().get("public.second") == "sync_wait")
    before = flush_position(database.connection)
    with database.connection.transaction():
        database.execute("insert into first values (2, 1)")
        database.execute("insert into second values (1, 1)")
    run.wait_for(lambda: Seen.has_read_past(before))


@pytest.mark.usefixtures("first")
def test_the_last_write_of_a_copy_runs_beside_a_write_of_the_apply_worker_and_holds_nobody_up(
    database: Database,
) -> None:
    doors = Doors("first")
    with running(database, doors) as run:
        until_asked(database, run, doors)
        # To answer now, in the middle of a write, would hold the next one up.
        assert not run.pipeline.progress.wait_for(lambda now: now.states()["public.second"] != "sync_wait", 0.5)
        doors.let_through("first")
        doors.wait_begun("first")
        run.wait_for(lambda: run.states()["public.second"].startswith("sync_done"))
        assert doors.tables["second"] == {1: (1, 1)}
        doors.let_through("first", 100)
        run.wait_states("ready", 2)
        now = run.pipeline.progress.snapshot()
        assert (now.hand_offs, now.longest_pause_seconds) == (2, 0)
        run.wait_caught_up()
        run.assert_equal("first", "second")


@pytest.mark.usefixtures("first")
def test_how_long_a_hand_off_holds_changes_up_is_measured_and_for_whom_is_said(database: Database) -> None:
    doors = Doors("first", "second")
    with running(database, doors) as run:
        until_asked(database, run, doors)
        doors.let_through("first", 100)
        doors.wait_begun("second")
        database.execute("insert into first values (3, 1)")
        run.wait_for(lambda: run.pipeline.progress.snapshot().waiting == "the copy of public.second to catch up")
        began = time.monotonic()
        assert not run.pipeline.progress.wait_for(lambda now: now.waiting is None, 0.3)
        assert 3 not in doors.tables["first"]
        held_up = time.monotonic() - began
        doors.let_through("second", 100)
        run.wait_states("ready", 2)
        now = run.pipeline.progress.snapshot()
        assert (now.hand_offs, now.waiting) == (2, None)
        assert now.longest_pause_seconds >= held_up
        run.wait_caught_up()
        run.assert_equal("first", "second")


def end_session(database: Database, run: Running, slot: str) -> None:
    """The walsender that serves the slot is gone, for good."""
    assert database.execute(
        "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", [slot]
    )
    run.wait_for(lambda: not database.value("select active from pg_replication_slots where slot_name = %s", [slot]))


def end_session_for_all_to_see(database: Database, run: Running, slot: str, caplog: pytest.LogCaptureFixture) -> None:
    """And the worker knows: whatever it has read and not written is dropped."""
    end_session(database, run, slot)
    run.wait_for(lambda: "following its slot again" in caplog.text)


def second_slot(database: Database) -> str:
    return sync_slot_name(1, TableId(database.value("select 'second'::regclass::oid::bigint")))


def until_following(database: Database, run: Running, doors: Doors) -> None:
    """The second table is copied, and what came after that, too much to ask at once, is being written."""
    run.wait_states("ready", 1)

    def write(rows: TableRows) -> None:
        # In many transactions: in the middle of a single one the server's position says that we are close.
        for number in range(20):
            query = "insert into second select i, 1 from generate_series(%s::int, %s::int) i"
            database.execute(query, [1 + number * 2000, (number + 1) * 2000])

    doors.after_copy = write
    database.execute("alter publication shop add table second")
    doors.wait_begun("second")


@pytest.mark.usefixtures("first")
def test_a_connection_lost_between_a_copy_and_its_changes_costs_no_copy(database: Database) -> None:
    ended: list[bool] = []

    def end_walsender(rows: TableRows) -> None:
        query = "select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name = %s and backend_type = %s"
        with database.connect() as other:
            ended.extend(found for (found,) in other.execute(query, [second_slot(database), "walsender"]))

    with running(database) as run:
        run.wait_states("ready", 1)
        run.mirror.after_copy = end_walsender
        database.execute("alter publication shop add table second")
        run.wait_states("ready", 2)
        assert ended == [True]
        database.execute("insert into second values (1, 1)")
        run.wait_caught_up()
        run.assert_equal("first", "second")
        assert run.mirror.copies == ["first", "second"]


@pytest.mark.usefixtures("first")
def test_a_connection_lost_while_a_copy_is_followed_costs_no_copy(database: Database) -> None:
    doors = Doors("second")
    with running(database, doors) as run:
        until_following(database, run, doors)
        assert run.states()["public.second"] == "finished_copy"
        database.execute("insert into second values (0, 1)")
        end_session(database, run, second_slot(database))
        doors.let_through("second", 100)
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("first", "second")
        assert doors.copies == ["first", "second"]


@pytest.mark.usefixtures("first")
def test_a_connection_lost_while_the_hand_off_is_waited_for_costs_no_copy(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    doors = Doors("first")
    with running(database, doors) as run:
        until_asked(database, run, doors)
        end_session_for_all_to_see(database, run, second_slot(database), caplog)
        doors.let_through("first", 100)
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("first", "second")
        assert doors.copies == ["first", "second"]


@pytest.mark.usefixtures("first")
def test_a_slot_dropped_while_a_copy_is_followed_begins_the_copy_again(database: Database) -> None:
    doors = Doors("second")
    with running(database, doors) as run:
        until_following(database, run, doors)
        doors.after_copy = lambda rows: None
        end_session(database, run, second_slot(database))
        database.execute("select pg_drop_replication_slot(%s)", [second_slot(database)])
        database.execute("insert into second values (0, 1)")
        doors.let_through("second", 100)
        run.wait_for(lambda: doors.copies == ["first", "second", "second"])
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("first", "second")


@pytest.mark.usefixtures("first")
def test_a_worker_that_cannot_connect_again_does_not_hold_the_others_up_for_ever(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    doors = Doors("first")
    with running(database, doors) as run:
        until_asked(database, run, doors)
        with monkeypatch.context() as patched:
            patched.setattr(sync_stream, "WireConnection", Unreachable)
            end_session_for_all_to_see(database, run, second_slot(database), caplog)
            doors.let_through("first", 100)
            run.wait_for(lambda: run.states()["public.second"] == "init")
            database.execute("insert into first values (3, 1)")
            run.wait_for(lambda: 3 in doors.tables["first"])
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("first", "second")


@pytest.mark.usefixtures("first")
def test_a_connection_that_breaks_again_and_again_does_not_hold_the_others_up_for_ever(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    doors = Doors("first")
    with running(database, doors) as run:
        until_asked(database, run, doors)
        with monkeypatch.context() as patched:
            patched.setattr(sync_stream, "SlotStream", Breaking)
            end_session_for_all_to_see(database, run, second_slot(database), caplog)
            doors.let_through("first", 100)
            run.wait_for(lambda: run.states()["public.second"] == "init")
            database.execute("insert into first values (3, 1)")
            run.wait_for(lambda: 3 in doors.tables["first"])
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("first", "second")


class Breaking(slot_stream.SlotStream):
    """Is made, and breaks before anything has come."""

    looks = 0

    def take(self) -> list[Chunk]:
        self.looks += 1
        if self.looks > 1:
            raise ConnectionLost("broken", hint="Wait.")
        return []


@pytest.mark.usefixtures("first")
def test_a_worker_that_waits_to_connect_again_connects_as_soon_as_it_is_waited_for(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The server was away for long: the next attempt lies far ahead.
    monkeypatch.setattr(sync_follow, "Backoff", lambda first: Backoff(600.0, 600.0))
    doors = Doors("first")
    with running(database, doors) as run:
        until_asked(database, run, doors)
        end_session_for_all_to_see(database, run, second_slot(database), caplog)
        doors.let_through("first", 100)
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("first", "second")
        assert doors.copies == ["first", "second"]


@pytest.mark.usefixtures("first")
def test_a_slot_that_a_lost_session_still_holds_is_no_error_of_the_table(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other session comes first.
    monkeypatch.setattr(sync_follow, "Backoff", lambda first: Backoff(4.0))
    doors = Doors("first")
    with running(database, doors) as run:
        until_asked(database, run, doors)
        slot = second_slot(database)
        settings = replace(database.settings, application_name=slot)
        with WireConnection.connect(settings, replication=True) as stale:
            end_session(database, run, slot)
            options = StreamOptions("shop", True, 10.0).for_server()
            stale.start_replication(slot, ZERO, options, status_interval_seconds=10.0)
            doors.let_through("first", 100)
            run.wait_for(lambda: run.states()["public.second"] in ("init", "errored"))
            assert run.states()["public.second"] == "init"
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("first", "second")


def test_a_worker_that_waits_for_an_answer_does_not_keep_the_server_from_stopping() -> None:
    """A server stops when all it has sent is confirmed, the apply worker answers only with a server, and we confirm only then."""
    doors = Doors("first")
    with PostgresServer.start() as server:
        with server.connect() as connection:
            database = Database(server, "postgres", connection)
            make_first(database)
            with running(database, doors) as run:
                run.wait_states("ready", 1)
                doors.after_copy = lambda rows: database.execute(
                    "insert into second select i, 1 from generate_series(100, 30000) i"
                )
                until_asked(database, run, doors)
                end_session(database, run, apply_slot_name(1))
                server.stop()
                doors.after_copy = lambda rows: None
                server.restart()
                doors.let_through("first", 100)
                run.wait_states("ready", 2)
                with server.connect() as again:
                    run.database = Database(server, "postgres", again)
                    run.wait_caught_up()
                    run.assert_equal("first", "second")
        assert doors.copies == ["first", "second"]


class Unreachable:
    @staticmethod
    def connect(settings: ConnectSettings, **options: object) -> None:
        raise ConnectError("no way there", hint="Wait.")


def test_busy_tables_of_a_group_are_handed_over_a_few_at_a_time_and_end_equal(database: Database) -> None:
    names = make_tables(database, TABLES)
    database.execute("drop publication shop; create publication shop for table t0, t1")
    gate = Gate("t3")
    gate.before_events = lambda batch: time.sleep(0.05)  # a slow one: changes of the others come during a hand-off
    with writing(database, names), running(database, gate) as run:
        run.wait_states("ready", 2)
        database.execute("alter publication shop set table " + ", ".join(names))
        assert gate.begun.wait(30)
        for name in names:
            # Compressed by nobody: more than a megabyte is waiting in the slot when the copy ends.
            note = "(select string_agg(md5(i * j || ''), '') from generate_series(1, 50) j)"
            database.execute(f"insert into {name} select i, 1, {note} from generate_series(100, 300) i")
        before = run.pipeline.progress.snapshot().hand_offs
        gate.open.set()
        run.wait_states("ready", TABLES)
        assert run.pipeline.progress.snapshot().hand_offs > before + 1
    with running(database, gate, run.pipeline._store) as again:
        again.wait_caught_up()
        again.assert_equal(*names)
        assert sorted(gate.copies) == names


@pytest.mark.usefixtures("first")
def test_a_table_that_leaves_while_its_changes_are_put_off_keeps_nobody_back(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_follow, "_PUT_OFF_BYTES", 64 << 10)
    note = "(select string_agg(md5(i * j || ''), '') from generate_series(1, 50) j)"
    names = ("busy", "gone", "later")
    for name in (*names, "rest"):
        database.execute(f"create table {name}(id int primary key, note text)")

    def fall_behind(rows: TableRows) -> None:
        doors.after_copy = lambda rows: None
        with database.connection.transaction():
            for name in names:
                database.execute(f"insert into {name} select i, {note} from generate_series(1, 700) i")

    doors = Doors("first")
    with running(database, doors) as run:
        run.wait_states("ready", 1)
        database.execute("insert into first values (1, 1)")
        doors.wait_begun("first")
        doors.after_copy = fall_behind
        database.execute("alter publication shop add table busy, gone, later, rest")
        run.wait_for(lambda: run.states().get("public.rest") == "sync_wait")
        for name in names:
            database.execute(f"insert into {name} values (0, '')")
        before = flush_position(database.connection)
        database.execute("insert into first values (2, 1)")
        run.wait_for(lambda: Seen.has_read_past(before))
        doors.let_through("first")
        doors.wait_begun("first")
        run.wait_for(lambda: run.states()["public.busy"] == "sync_wait")
        database.execute("alter publication shop drop table gone")
        run.wait_for(lambda: "public.gone" not in run.states())
        database.execute(f"insert into later select i, {note} from generate_series(701, 800) i")
        before = flush_position(database.connection)
        database.execute("insert into first values (3, 1)")
        run.wait_for(lambda: Seen.has_read_past(before))
        doors.let_through("first", 100)
        run.wait_states("ready", 4)
        run.wait_caught_up()
        run.assert_equal("first", "busy", "later", "rest")


class WatchedFollow(SyncFollow):
    """Lets a test see what is held back."""

    newest: WatchedFollow | None = None
    rounds = 0

    def follow(self) -> None:
        WatchedFollow.newest = self
        super().follow()

    def _ask_if_close(self, gaining: bool) -> None:
        self.rounds += 1
        super()._ask_if_close(gaining)

    @property
    def held_bytes(self) -> int:
        return self._stream.decoder.buffered_bytes + self._unwritten_bytes


class NoProgress(MemoryStore):
    """Cannot be reached for the apply worker's progress."""

    away = False

    def upsert_replication_progress(self, worker_type: WorkerType, flush_lsn: EndLsn) -> EndLsn:
        if self.away and worker_type == APPLY:
            raise StoreUnavailable("the store is away", hint="Wait.")
        return super().upsert_replication_progress(worker_type, flush_lsn)


def test_what_a_group_holds_back_while_nobody_answers_it_is_bounded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_sync, "SyncFollow", WatchedFollow)
    monkeypatch.setattr(slot_stream, "QUEUE_BYTES", 64 << 10)
    monkeypatch.setattr(WatchedFollow, "newest", None)
    rows = "select i, 1, (select string_agg(md5(i * j || ''), '') from generate_series(1, 50) j) from generate_series"
    database.execute("create table first(id int primary key, counter int not null); create publication shop")
    database.execute("alter publication shop add table first")
    store, gate = NoProgress(), Gate("rest")
    with running(database, gate, store, batch=BatchConfig(max_fill_ms=100, max_bytes=64 << 10)) as run:
        run.wait_states("ready", 1)
        # The apply worker waits for the store, and answers nobody.
        store.away = True
        database.execute("insert into first values (1, 1)")
        run.wait_for(lambda: len(gate.batches) == 1)
        for name in ("rest", "busy"):
            database.execute(f"create table {name}(id int primary key, counter int not null, note text)")
        database.execute("alter publication shop add table rest, busy")
        assert gate.begun.wait(30)
        # So far behind that the worker takes in changes, and knows who is busy, before it asks.
        database.execute(f"insert into busy {rows}(1, 1000) i")
        gate.open.set()
        run.wait_for(lambda: run.states().get("public.rest") == "sync_wait")
        for number in range(1, 6):
            database.execute(f"insert into busy {rows}({number * 1000 + 1}, {number * 1000 + 1000}) i")
        follow = WatchedFollow.newest
        assert follow is not None
        run.wait_for(lambda: follow.held_bytes > 64 << 10 and not follow._stream.dry)
        rounds, held = follow.rounds, follow.held_bytes
        run.wait_for(lambda: follow.rounds > rounds + 5)
        assert (follow.held_bytes, follow._stream.dry) == (held, False)
        store.away = False
        run.wait_states("ready", 3)
        run.wait_caught_up()
        run.assert_equal("first", "rest", "busy")
        assert sorted(gate.copies) == ["busy", "first", "rest"]
