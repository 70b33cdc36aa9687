"""The destination fails before, in the middle of and after a copy or a batch: it ends equal, and nothing took effect twice."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from headwater.errors import DestinationError, DestinationUnavailable, Retry
from headwater.events import TableRows
from headwater.states import INIT
from headwater.store.memory import MemoryStore
from tests.background_writes import writing_by
from tests.conftest import Database
from tests.file_destination import CounterChanges, FileDestination
from tests.integration.counter_tables import create_counter_tables
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import config, running, running_pipeline

TABLES = ("orders", "items")


@pytest.fixture
def shop(database: Database) -> Database:
    create_counter_tables(database, orders=0, items=0)
    return database


class Failing:
    """Raises every third time it is called, three times in all."""

    def __init__(self) -> None:
        self._calls = itertools.count(1)
        self.failures = 0

    def __call__(self, what: object) -> None:
        if next(self._calls) % 3 == 0 and self.failures < 3:
            self.failures += 1
            raise DestinationUnavailable("the destination went away", hint="Wait.")


@pytest.mark.promise("the destination fails before, during and after a batch")
@pytest.mark.invariant(2)
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_the_destination_fails_before_during_and_after_a_batch_and_nothing_is_lost_or_doubled(
    shop: Database, tmp_path: Path, moment: str
) -> None:
    """During: one table of the batch is durable, the other is not. After: both are, and nobody is told."""
    destination, fail, counting = FileDestination(tmp_path / "destination.db"), Failing(), CounterChanges(*TABLES)
    with running_pipeline(shop, config(shop), MemoryStore(), destination) as run:
        run.wait_states("ready", 2)
        with writing_by(shop, counting, pace_seconds=0.002):
            if moment == "before":
                destination.before_batch = fail
            elif moment == "during":
                destination.after_table = lambda name: fail(name) if name == "items" else None
            else:
                destination.after_batch = fail
            run.wait_for(lambda: fail.failures == 3)
            changes = run.pipeline.progress.snapshot().changes
            run.wait_for(lambda: run.pipeline.progress.snapshot().changes > changes)
        run.wait_caught_up()
        destination.assert_equal(shop, *TABLES)
        destination.assert_every_step_once(*TABLES)
        assert [destination.copies(table) for table in TABLES] == [1, 1]


@pytest.mark.promise("the destination fails before, during and after a batch")
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_the_destination_fails_before_during_and_after_a_copy_and_the_copy_is_made_again(
    shop: Database, moment: str
) -> None:
    for table in TABLES:
        shop.execute(f"insert into {table} select i, 1 from generate_series(1, 1000) i")
    destination, failures = MemoryTables(), iter(range(2))

    def fail(rows: TableRows) -> None:
        if next(failures, None) is not None:
            raise DestinationUnavailable("the destination went away", hint="Wait.")

    if moment == "before":
        destination.before_copy = fail
    elif moment == "during":
        destination.during_copy = fail
    else:
        destination.after_copy = fail
    with running(shop, destination) as run:
        run.wait_states("ready", 2)
        shop.execute("update orders set counter = 2 where id <= 10; delete from items where id > 900")
        run.wait_caught_up()
        run.assert_equal(*TABLES)
    assert next(failures, None) is None
    # One that failed after the rows were there was a copy, too: the next one took its place.
    assert len(destination.copies) == (4 if moment == "after" else 2)


@pytest.mark.promise("no retry, manual and timed")
def test_a_table_whose_error_says_never_is_retried_only_by_the_user(shop: Database) -> None:
    destination, store, refusals = MemoryTables(), MemoryStore(), iter(range(1))

    def refuse(rows: TableRows) -> None:
        if next(refusals, None) is not None:
            raise DestinationError("no such thing here", hint="Nothing helps.", retry=Retry.NEVER)

    destination.before_copy = refuse
    with running(shop, destination, store) as run:
        run.wait_states("errored", 1)
        run.wait_states("ready", 1)
        run.stop()
    # Started again, with another table to copy: the pool has gone round, and the one that stopped was left alone.
    shop.execute("create table late(id int primary key); alter publication shop add table late")
    with running(shop, destination, store) as run:
        run.wait_states("ready", 2)
        assert list(run.states().values()).count("errored") == 1
        assert len(destination.copies) == 2
        (table, state) = next((t, s) for t, s in store.get_table_states().items() if s.reason)
        assert state.retry_policy is not None
        assert (state.retry_policy.kind, state.retry_policy.next_retry) == (Retry.NEVER, None)
        run.stop()
    store.update_table_state(table, INIT)
    with running(shop, destination, store) as run:
        run.wait_states("ready", 3)
        run.assert_equal(*TABLES, "late")
