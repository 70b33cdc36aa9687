"""The hand-off beside tables that are followed already: it holds their changes up as little as it can, and says how long."""

from __future__ import annotations

import time

import pytest

from headwater.config import BatchConfig
from headwater.contracts.stores import APPLY, WorkerType
from headwater.engine import hand_off
from headwater.engine.follow import slot_stream
from headwater.engine.table_sync import worker as table_sync
from headwater.engine.table_sync.catch_up import CatchUp
from headwater.errors import StoreUnavailable
from headwater.events import TableRows
from headwater.lsn import EndLsn
from headwater.store.memory import MemoryStore
from headwater.testing.compare import flush_position
from tests.conftest import Database
from tests.integration.blocking_destination import BlockingDestination, ObservedApplyWorker, wait_for_hand_off_request
from tests.integration.running_pipeline import running
from tests.integration.small_tables import BlockingCopyDestination, make_tables, writing

TABLES = 8


@pytest.mark.promise("the apply worker pauses shortly, and the longest pause is shown")
@pytest.mark.usefixtures("first")
def test_the_last_write_of_a_copy_runs_in_parallel_with_a_write_of_the_apply_worker_and_blocks_no_table(
    database: Database,
) -> None:
    destination = BlockingDestination("first")
    with running(database, destination) as run:
        wait_for_hand_off_request(database, run, destination)
        # To answer now, in the middle of a write, would hold the next one up.
        assert not run.pipeline.progress.wait_for(lambda now: now.states()["public.second"] != "sync_wait", 0.5)
        destination.allow("first")
        destination.wait_blocked("first")
        run.wait_for(lambda: run.states()["public.second"].startswith("sync_done"))
        assert destination.tables["second"] == {1: (1, 1)}
        destination.allow("first", 100)
        run.wait_states("ready", 2)
        now = run.pipeline.progress.snapshot()
        assert (now.hand_offs, now.longest_pause_seconds) == (2, 0)
        run.wait_caught_up()
        run.assert_equal("first", "second")


@pytest.mark.promise("the apply worker pauses shortly, and the longest pause is shown")
@pytest.mark.usefixtures("first")
def test_how_long_a_hand_off_holds_changes_up_is_measured_and_for_whom_is_said(database: Database) -> None:
    destination = BlockingDestination("first", "second")
    with running(database, destination) as run:
        wait_for_hand_off_request(database, run, destination)
        destination.allow("first", 100)
        destination.wait_blocked("second")
        database.execute("insert into first values (3, 1)")
        run.wait_for(lambda: run.pipeline.progress.snapshot().waiting == "the copy of public.second to catch up")
        began = time.monotonic()
        assert not run.pipeline.progress.wait_for(lambda now: now.waiting is None, 0.3)
        assert 3 not in destination.tables["first"]
        held_up = time.monotonic() - began
        destination.allow("second", 100)
        run.wait_states("ready", 2)
        now = run.pipeline.progress.snapshot()
        assert (now.hand_offs, now.waiting) == (2, None)
        assert now.longest_pause_seconds >= held_up
        run.wait_caught_up()
        run.assert_equal("first", "second")


@pytest.mark.promise("Ready is reached under heavy traffic")
def test_busy_tables_of_a_group_are_handed_over_a_few_at_a_time_and_end_equal(database: Database) -> None:
    names = make_tables(database, TABLES)
    database.execute("drop publication shop; create publication shop for table t0, t1")
    destination = BlockingCopyDestination("t3")
    destination.before_events = lambda batch: time.sleep(
        0.05
    )  # a slow one: changes of the others come during a hand-off
    with writing(database, names), running(database, destination) as run:
        run.wait_states("ready", 2)
        database.execute("alter publication shop set table " + ", ".join(names))
        assert destination.begun.wait(30)
        for name in names:
            # Compressed by nobody: more than a megabyte is waiting in the slot when the copy ends.
            note = "(select string_agg(md5(i * j || ''), '') from generate_series(1, 50) j)"
            database.execute(f"insert into {name} select i, 1, {note} from generate_series(100, 300) i")
        before = run.pipeline.progress.snapshot().hand_offs
        destination.open.set()
        run.wait_states("ready", TABLES)
        assert run.pipeline.progress.snapshot().hand_offs > before + 1
    with running(database, destination, run.pipeline._store) as again:
        again.wait_caught_up()
        again.assert_equal(*names)
        assert sorted(destination.copies) == names


@pytest.mark.promise("catching up that fails does not stop the apply worker")
@pytest.mark.usefixtures("first")
def test_a_table_that_leaves_while_its_changes_are_deferred_does_not_block_the_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_off, "MOST_DEFERRED_BYTES", 64 << 10)
    note = "(select string_agg(md5(i * j || ''), '') from generate_series(1, 50) j)"
    names = ("busy", "gone", "later")
    for name in (*names, "rest"):
        database.execute(f"create table {name}(id int primary key, note text)")

    def fall_behind(rows: TableRows) -> None:
        destination.after_copy = lambda rows: None
        with database.connection.transaction():
            for name in names:
                database.execute(f"insert into {name} select i, {note} from generate_series(1, 700) i")

    destination = BlockingDestination("first")
    with running(database, destination) as run:
        run.wait_states("ready", 1)
        database.execute("insert into first values (1, 1)")
        destination.wait_blocked("first")
        destination.after_copy = fall_behind
        database.execute("alter publication shop add table busy, gone, later, rest")
        run.wait_for(lambda: run.states().get("public.rest") == "sync_wait")
        for name in names:
            database.execute(f"insert into {name} values (0, '')")
        before = flush_position(database.connection)
        database.execute("insert into first values (2, 1)")
        run.wait_for(lambda: ObservedApplyWorker.has_read_past(before))
        destination.allow("first")
        destination.wait_blocked("first")
        run.wait_for(lambda: run.states()["public.busy"] == "sync_wait")
        database.execute("alter publication shop drop table gone")
        run.wait_for(lambda: "public.gone" not in run.states())
        database.execute(f"insert into later select i, {note} from generate_series(701, 800) i")
        before = flush_position(database.connection)
        database.execute("insert into first values (3, 1)")
        run.wait_for(lambda: ObservedApplyWorker.has_read_past(before))
        destination.allow("first", 100)
        run.wait_states("ready", 4)
        run.wait_caught_up()
        run.assert_equal("first", "busy", "later", "rest")


class WatchedCatchUp(CatchUp):
    """Lets a test see what is held back."""

    newest: WatchedCatchUp | None = None
    rounds = 0

    def run(self) -> None:
        WatchedCatchUp.newest = self
        super().run()

    def _ask_if_close(self, gaining: bool) -> None:
        self.rounds += 1
        super()._ask_if_close(gaining)

    @property
    def held_bytes(self) -> int:
        return self._follower._decoder.buffered_bytes + self._deferred_bytes


class NoProgress(MemoryStore):
    """Cannot be reached for the apply worker's progress."""

    away = False

    def upsert_replication_progress(self, worker_type: WorkerType, flush_lsn: EndLsn) -> EndLsn:
        if self.away and worker_type == APPLY:
            raise StoreUnavailable("the store is away", hint="Wait.")
        return super().upsert_replication_progress(worker_type, flush_lsn)


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_what_a_group_defers_while_the_apply_worker_does_not_answer_is_bounded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_sync, "CatchUp", WatchedCatchUp)
    monkeypatch.setattr(slot_stream, "QUEUE_BYTES", 64 << 10)
    monkeypatch.setattr(WatchedCatchUp, "newest", None)
    rows = "select i, 1, (select string_agg(md5(i * j || ''), '') from generate_series(1, 50) j) from generate_series"
    database.execute("create table first(id int primary key, counter int not null); create publication shop")
    database.execute("alter publication shop add table first")
    store, destination = NoProgress(), BlockingCopyDestination("rest")
    with running(database, destination, store, batch=BatchConfig(max_fill_ms=100, max_bytes=64 << 10)) as run:
        run.wait_states("ready", 1)
        # The apply worker waits for the store, and answers nobody.
        store.away = True
        database.execute("insert into first values (1, 1)")
        run.wait_for(lambda: len(destination.batches) == 1)
        for name in ("rest", "busy"):
            database.execute(f"create table {name}(id int primary key, counter int not null, note text)")
        database.execute("alter publication shop add table rest, busy")
        assert destination.begun.wait(30)
        # So far behind that the worker takes in changes, and knows who is busy, before it asks.
        database.execute(f"insert into busy {rows}(1, 1000) i")
        destination.open.set()
        run.wait_for(lambda: run.states().get("public.rest") == "sync_wait")
        for number in range(1, 6):
            database.execute(f"insert into busy {rows}({number * 1000 + 1}, {number * 1000 + 1000}) i")
        follow = WatchedCatchUp.newest
        assert follow is not None
        run.wait_for(lambda: follow.held_bytes > 64 << 10 and not follow._follower.dry)
        rounds, held = follow.rounds, follow.held_bytes
        run.wait_for(lambda: follow.rounds > rounds + 5)
        assert (follow.held_bytes, follow._follower.dry) == (held, False)
        store.away = False
        run.wait_states("ready", 3)
        run.wait_caught_up()
        run.assert_equal("first", "rest", "busy")
        assert sorted(destination.copies) == ["busy", "first", "rest"]
