"""Result handles as a destination may treat them, right and wrong, with the engine over a real server."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from headwater.contracts.results import WriteEventsResult, WriteTableRowsResult
from headwater.contracts.stores import WorkerType
from headwater.engine.supervise import round
from headwater.errors import (
    DestinationError,
    DestinationUnavailable,
    HeadwaterError,
    Retry,
    StoreError,
    StoreUnavailable,
)
from headwater.events import EventBatch, TableRows
from headwater.lsn import EndLsn
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.source.slots import apply_slot_name
from headwater.states import INIT, Phase, TableState
from headwater.store.memory import MemoryStore
from headwater.testing.compare import confirmed_position, flush_position
from headwater.wire.pgoutput import PgOutputDecoder
from headwater.wire.spool import MemoryBudget, Spool
from tests.conftest import Database
from tests.integration.counter_tables import create_counter_tables
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import running

SLOT = apply_slot_name(1)


@pytest.fixture
def shop(database: Database) -> Database:
    create_counter_tables(database, orders=100, items=100)
    return database


def table_id(shop: Database, name: str) -> TableId:
    return TableId(shop.value("select %s::regclass::oid::int", [name]))


class Careless(MemoryTables):
    """Forgets the handles of its first calls."""

    def __init__(self, copies: int = 0, batches: int = 0) -> None:
        super().__init__()
        self.copies_to_forget, self.batches_to_forget = copies, batches

    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        if self.copies_to_forget > 0:
            self.copies_to_forget -= 1
            return
        super().write_table_rows(replicated_table_schema, table_rows, result)

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        if self.batches_to_forget > 0:
            self.batches_to_forget -= 1
            return
        super().write_events(events, result)


@pytest.mark.promise("a result handle is dropped")
def test_a_copy_whose_result_is_dropped_errs_and_is_made_again(shop: Database) -> None:
    with running(shop, Careless(copies=1), max_table_sync_workers=1) as run:
        run.wait_states("ready", 2)
        assert any(
            "dropped the result of write_table_rows" in error for error in run.pipeline.progress.snapshot().errors
        )
        run.assert_equal("orders", "items")


@pytest.mark.promise("a result handle is dropped")
def test_a_batch_whose_result_is_dropped_comes_again(shop: Database) -> None:
    destination = Careless()
    with running(shop, destination) as run:
        run.wait_states("ready", 2)
        destination.batches_to_forget = 1
        shop.execute("update orders set counter = 2")
        run.wait_caught_up()
        assert destination.batches_to_forget == 0
        run.assert_equal("orders", "items")


class Late(MemoryTables):
    """Returns from write_events at once and works when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.late = False
        self.kept: list[tuple[EventBatch, WriteEventsResult]] = []

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        if self.late:
            self.kept.append((events, result))
        else:
            super().write_events(events, result)

    def finish(self) -> None:
        super().write_events(*self.kept.pop())


class WatchedDecoder(PgOutputDecoder):
    """Lets a test see whether the next batch fills."""

    newest: WatchedDecoder

    def __init__(self, spool: Spool | None = None, budget: MemoryBudget | None = None) -> None:
        super().__init__(spool, budget)
        if threading.current_thread().name == "headwater-apply":  # not one of a table sync worker
            WatchedDecoder.newest = self


@pytest.fixture
def watched_decoder(monkeypatch: pytest.MonkeyPatch) -> type[WatchedDecoder]:
    monkeypatch.setattr(round, "PgOutputDecoder", WatchedDecoder)
    return WatchedDecoder


@pytest.mark.invariant(2)
def test_the_next_batch_fills_while_a_result_is_completed_later(
    shop: Database, watched_decoder: type[WatchedDecoder]
) -> None:
    destination = Late()
    with running(shop, destination) as run:
        run.wait_states("ready", 2)
        destination.late = True
        shop.execute("update orders set counter = 2")
        run.wait_for(lambda: len(destination.kept) == 1)
        end = destination.kept[0][0].end_lsn
        for turn in range(3):
            shop.execute(f"update items set counter = {turn}")
        run.wait_for(lambda: watched_decoder.newest.has_transactions)
        # One call at a time, and nothing is confirmed before its result.
        assert len(destination.kept) == 1
        assert confirmed_position(shop.connection, SLOT) < end.value
        destination.late = False
        destination.finish()
        run.wait_caught_up()
        run.assert_equal("orders", "items")


@pytest.mark.promise("a deadline that is missed, and single tables that fail")
def test_a_missed_deadline_stops_the_pipeline_and_the_next_run_ends_equal(shop: Database) -> None:
    destination, store = Late(), MemoryStore()
    with running(shop, destination, store, destination_deadline_ms=1000) as run:
        run.wait_states("ready", 2)
        destination.late = True
        shop.execute("update orders set counter = 2")
        with pytest.raises(DestinationError, match="missed the deadline of write_events") as caught:
            run.pipeline.wait(30)
        assert "destination_deadline_ms" in caught.value.hint
    # Completed after all, and too late to count: nothing of it was recorded.
    destination.late = False
    destination.finish()
    with running(shop, destination, store) as run:
        run.wait_caught_up()
        run.assert_equal("orders", "items")


@pytest.mark.promise("no retry, manual and timed")
def test_a_copy_that_misses_its_deadline_is_its_tables_error_and_the_others_go_on(shop: Database) -> None:
    destination, store, release = MemoryTables(), MemoryStore(), threading.Event()
    blocked = iter([True])

    def block_the_first(rows: TableRows) -> None:
        if next(blocked, False):
            release.wait(30)

    destination.before_copy = block_the_first
    with running(shop, destination, store, destination_deadline_ms=1000, max_table_sync_workers=1) as run:
        run.wait_states("errored", 1)
        run.wait_states("ready", 1)
        release.set()
        (state,) = (s for s in store.get_table_states().values() if s.phase is Phase.ERRORED)
        assert "missed the deadline of write_table_rows" in state.reason
        assert state.retry_policy is not None
        assert state.retry_policy.kind is Retry.MANUAL


class Picky(MemoryTables):
    """Fails the tables it is told to, once, and writes the others."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[TableId, Exception] = {}

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        failing = {table: error for table, error in self.failing.items() if table in events.tables}
        if not failing:
            super().write_events(events, result)
            return
        rest = EventBatch(
            {table: steps for table, steps in events.tables.items() if table not in failing},
            events.transactions,
            events.end_lsn,
        )
        written = WriteEventsResult()
        super().write_events(rest, written)
        self.failing = {}
        result.failed_tables(failing)


@pytest.mark.promise("a deadline that is missed, and single tables that fail")
@pytest.mark.invariant(15)
def test_named_tables_that_fail_are_errored_and_the_others_go_on(shop: Database) -> None:
    destination, store = Picky(), OrderedStore()
    with running(shop, destination, store) as run:
        run.wait_states("ready", 2)
        orders = table_id(shop, "orders")
        destination.failing = {orders: DestinationError("no room for orders", hint="Make room.", retry=Retry.MANUAL)}
        store.steps.clear()
        with shop.connection.transaction():
            shop.execute("update orders set counter = 2; update items set counter = 2")
        run.wait_states("errored", 1)
        run.wait_caught_up()
        assert store.steps[:2] == ["errored", "progress"]
        assert run.states() == {"public.orders": "errored", "public.items": "ready"}
        # Its changes are dropped from here on, and those of the others are not.
        shop.execute("update orders set counter = 3; update items set counter = 3")
        run.wait_caught_up()
        run.assert_equal("items")
        assert {row[1] for row in destination.tables["orders"].values()} == {1}


class OrderedStore(MemoryStore):
    """Remembers in which order errors and progress were recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def update_table_states(self, updates: Sequence[tuple[TableId, TableState]]) -> None:
        self.steps += [state.phase.value for _, state in updates]
        super().update_table_states(updates)

    def upsert_replication_progress(self, worker_type: WorkerType, flush_lsn: EndLsn) -> EndLsn:
        self.steps.append("progress")
        return super().upsert_replication_progress(worker_type, flush_lsn)


@pytest.mark.promise("errored tables keep their policy across restarts")
@pytest.mark.promise("the slot of an errored table is released")
def test_an_errored_table_keeps_its_policy_across_restarts_and_its_slot_is_released(shop: Database) -> None:
    destination, store = MemoryTables(), MemoryStore()

    def refuse(rows: TableRows) -> None:
        raise DestinationError("no room", hint="Make room.", retry=Retry.MANUAL)

    destination.before_copy = refuse
    for _ in range(2):
        with running(shop, destination, store) as run:
            run.wait_states("errored", 2)
            run.wait_for(lambda: _slots(shop) == [SLOT])
        policies = [state.retry_policy for state in store.get_table_states().values()]
        assert [(policy.kind, policy.attempts) for policy in policies if policy] == [(Retry.MANUAL, 1)] * 2


def _slots(shop: Database) -> list[str]:
    rows = shop.execute("select slot_name from pg_replication_slots where database = current_database()")
    return [name for (name,) in rows]


@pytest.mark.promise("the budget of attempts resets on progress")
def test_a_table_that_fails_too_often_waits_for_rollback_and_progress_resets_the_attempts(shop: Database) -> None:
    destination, store = Picky(), MemoryStore()
    orders = table_id(shop, "orders")
    with running(shop, destination, store, table_error_retry_max_attempts=2, table_error_retry_delay_ms=10) as run:
        for turn in range(1, 5):
            run.wait_for(lambda turn=turn: destination.copies.count("orders") == turn)  # type: ignore[misc]
            run.wait_states("ready", 2)
            destination.failing = {orders: ValueError("seven")}
            shop.execute("update orders set counter = counter + 1")
        # Each time it had come to Ready before: four failures, and the budget of two was never used up.
        run.wait_for(lambda: destination.copies.count("orders") == 5)
        run.wait_states("ready", 2)
        refused = iter(range(10))

        def refuse(rows: TableRows) -> None:
            next(refused)
            raise ValueError("eight")

        destination.before_copy = refuse
        destination.failing = {orders: ValueError("seven")}
        shop.execute("update orders set counter = counter + 1")
        run.wait_for(lambda: _kind(store, orders) is Retry.MANUAL)
        assert next(refused) == 2


def _kind(store: MemoryStore, table: TableId) -> Retry | None:
    state = store.get_table_state(table)
    return state.retry_policy.kind if state is not None and state.retry_policy is not None else None


@pytest.mark.promise("no retry, manual and timed")
@pytest.mark.promise("the destination fails before, during and after a batch")
def test_a_named_table_with_a_timed_policy_comes_back_through_a_new_copy(shop: Database) -> None:
    destination = Picky()
    with running(shop, destination) as run:
        run.wait_states("ready", 2)
        destination.failing = {table_id(shop, "orders"): ValueError("seven")}
        shop.execute("update orders set counter = 2; update items set counter = 2")
        run.wait_for(lambda: destination.copies.count("orders") == 2)
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert destination.copies.count("items") == 1


@pytest.mark.invariant(15)
def test_a_named_table_whose_error_is_an_unreachable_destination_is_not_errored_and_the_batch_is_retried(
    shop: Database,
) -> None:
    destination, store = Picky(), OrderedStore()
    with running(shop, destination, store) as run:
        run.wait_states("ready", 2)
        store.steps.clear()
        destination.failing = {table_id(shop, "orders"): DestinationUnavailable("away", hint="Wait.")}
        shop.execute("update orders set counter = 2")
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert "errored" not in store.steps


@pytest.mark.promise("a deadline that is missed, and single tables that fail")
def test_a_table_that_is_to_be_copied_again_and_fails_in_a_batch_meanwhile_is_copied_again(shop: Database) -> None:
    destination, store = Late(), MemoryStore()
    with running(shop, destination, store) as run:
        run.wait_states("ready", 2)
        destination.late = True
        shop.execute("update orders set counter = 2")
        run.wait_for(lambda: len(destination.kept) == 1)
        destination.late = False
        store.update_table_state(table_id(shop, "orders"), INIT)
        run.wait_states("init", 1)
        destination.kept.pop()[1].failed_tables({table_id(shop, "orders"): ValueError("seven")})
        run.wait_for(lambda: destination.copies.count("orders") == 2)
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("orders", "items")


def test_a_failed_table_that_was_not_in_the_batch_is_a_defect_of_the_destination(shop: Database) -> None:
    destination = Late()
    with running(shop, destination) as run:
        run.wait_states("ready", 2)
        destination.late = True
        shop.execute("update orders set counter = 2")
        run.wait_for(lambda: len(destination.kept) == 1)
        destination.kept.pop()[1].failed_tables({table_id(shop, "items"): ValueError("seven")})
        with pytest.raises(DestinationError, match="not in the batch"):
            run.pipeline.wait(30)


@pytest.mark.promise("a copy that waits for its result is interrupted by shutdown")
@pytest.mark.promise("errors caused by shutdown are not recorded")
def test_shutdown_interrupts_the_wait_of_a_catching_up_table_and_no_error_is_recorded(shop: Database) -> None:
    # One table alone: a batch of the apply worker is not interrupted but waited for.
    shop.execute("alter publication shop drop table items")
    destination, store = Late(), MemoryStore()
    destination.late = True
    written = threading.Event()

    def write_meanwhile(rows: TableRows) -> None:
        if not written.is_set():
            written.set()
            with shop.connect() as connection:
                connection.execute("update orders set counter = 2")

    destination.during_copy = write_meanwhile
    with running(shop, destination, store) as run:
        run.wait_for(lambda: bool(destination.kept))
        run.stop()
    assert {state.phase for state in store.get_table_states().values()} <= {
        Phase.INIT,
        Phase.DATA_SYNC,
        Phase.FINISHED_COPY,
    }


@pytest.mark.promise("buffered writes drain before shutdown")
def test_what_was_read_whole_is_written_before_an_orderly_stop(
    shop: Database, watched_decoder: type[WatchedDecoder]
) -> None:
    destination = Late()
    with running(shop, destination) as run:
        run.wait_states("ready", 2)
        destination.late = True
        shop.execute("update orders set counter = 2")
        run.wait_for(lambda: len(destination.kept) == 1)
        shop.execute("update items set counter = 2")
        end = flush_position(shop.connection)
        run.wait_for(lambda: watched_decoder.newest.has_transactions)
        run.pipeline.shutdown()
        destination.late = False
        destination.finish()
        assert run.pipeline.wait(30)
        run.assert_equal("orders", "items")
        assert confirmed_position(shop.connection, SLOT) >= end


@pytest.mark.promise("buffered writes drain before shutdown")
@pytest.mark.invariant(2)
def test_nothing_behind_a_batch_that_failed_is_recorded_when_the_pipeline_stops(
    shop: Database, watched_decoder: type[WatchedDecoder]
) -> None:
    """The batch that failed waits to be tried again, the next one has filled, and somebody stops the pipeline."""
    destination, store = Late(), MemoryStore()
    with running(shop, destination, store) as run:
        run.wait_states("ready", 2)
        destination.late = True
        shop.execute("update orders set counter = 2")
        run.wait_for(lambda: len(destination.kept) == 1)
        shop.execute("update items set counter = 2")
        run.wait_for(lambda: watched_decoder.newest.has_transactions)
        destination.late = False
        destination.kept.pop()[1].failed(DestinationUnavailable("away", hint="Wait."))
        assert run.pipeline.progress.wait_for(lambda now: (now.waiting or "").startswith("writing a batch failed"), 60)
        run.stop()
    with running(shop, destination, store) as run:
        run.wait_caught_up()
        run.assert_equal("orders", "items")


class ShakyStore(MemoryStore):
    """Refuses to record some states, each for a number of times."""

    def __init__(self, refused: Mapping[Phase, Sequence[HeadwaterError]]) -> None:
        super().__init__()
        self.refused = {phase: list(errors) for phase, errors in refused.items()}

    def update_table_states(self, updates: Sequence[tuple[TableId, TableState]]) -> None:
        for phase in {state.phase for _, state in updates}:
            if self.refused.get(phase):
                raise self.refused[phase].pop(0)
        super().update_table_states(updates)


def store_away() -> StoreUnavailable:
    return StoreUnavailable("the store is away", hint="Wait.")


@pytest.mark.promise("catching up that fails does not stop the apply worker")
@pytest.mark.invariant(15)
def test_a_store_that_is_unreachable_after_the_copy_costs_no_copy(shop: Database) -> None:
    phases = (Phase.FINISHED_COPY, Phase.SYNC_DONE, Phase.READY)
    store = ShakyStore({phase: [store_away(), store_away()] for phase in phases})
    with running(shop, store=store) as run:
        run.wait_states("ready", 2)
        assert not any(store.refused.values())
        assert sorted(run.destination.copies) == ["items", "orders"]
        shop.execute("update orders set counter = 2; update items set counter = 2")
        run.wait_caught_up()
        run.assert_equal("orders", "items")


@pytest.mark.promise("catching up that fails does not stop the apply worker")
@pytest.mark.invariant(15)
def test_a_store_that_fails_at_the_hand_off_does_not_block_other_tables_for_ever(shop: Database) -> None:
    """Neither SyncDone nor the way back to Init could be recorded: the table stayed in Catchup, and everyone waited."""
    store, destination = ShakyStore({Phase.SYNC_DONE: [StoreError("not like this", hint="Look.")]}), MemoryTables()

    def refuse_the_way_back(rows: TableRows) -> None:
        store.refused.setdefault(Phase.INIT, [store_away()])

    destination.after_copy = refuse_the_way_back  # not before: Init is also what every table begins with
    with running(shop, destination, store) as run:
        run.wait_states("ready", 2)
        assert not any(store.refused.values())
        shop.execute("update orders set counter = 2; update items set counter = 2")
        run.wait_caught_up()
        run.assert_equal("orders", "items")
