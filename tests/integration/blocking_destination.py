"""A destination that blocks each write until the test allows it, and two tables: one followed, one added later."""

from __future__ import annotations

import threading
from typing import Any

from headwater.contracts.results import WriteEventsResult
from headwater.engine.apply.worker import ApplyWorker
from headwater.events import EventBatch
from headwater.testing.compare import flush_position
from tests.conftest import Database
from tests.integration.counter_tables import create_counter_tables
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import RunningIntoMemory


class BlockingDestination(MemoryTables):
    """Blocks the writes of changes of these tables until `allow` is called for each."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._allowed = {name: threading.Semaphore(0) for name in names}
        self._blocked = {name: threading.Semaphore(0) for name in names}

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        def write() -> None:
            for name in names:
                self._blocked[name].release()
                assert self._allowed[name].acquire(timeout=60)
            super(BlockingDestination, self).write_events(events, result)

        names = {steps[-1].schema.name.name for steps in events.tables.values()} & self._allowed.keys()
        threading.Thread(target=write, name="blocking-destination").start()

    def allow(self, name: str, writes: int = 1) -> None:
        self._allowed[name].release(writes)

    def wait_blocked(self, name: str) -> None:
        assert self._blocked[name].acquire(timeout=60)


class ObservedApplyWorker(ApplyWorker):
    """Lets a test see what the apply worker has read and not handed on."""

    newest: ObservedApplyWorker

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        ObservedApplyWorker.newest = self

    @classmethod
    def has_read_past(cls, position: int) -> bool:
        end = cls.newest._follower._decoder.end_position
        return end is not None and end.value > position


def create_tables(database: Database) -> None:
    create_counter_tables(database, first=0, second=0)
    database.execute("alter publication shop drop table second")


def wait_for_hand_off_request(database: Database, run: RunningIntoMemory, destination: BlockingDestination) -> None:
    """The first table's changes are being written, more of them wait, and the second one asks for its hand-off."""
    run.wait_states("ready", 1)
    database.execute("insert into first values (1, 1)")
    destination.wait_blocked("first")
    database.execute("alter publication shop add table second")
    run.wait_for(lambda: run.states().get("public.second") == "sync_wait")
    before = flush_position(database.connection)
    with database.connection.transaction():
        database.execute("insert into first values (2, 1)")
        database.execute("insert into second values (1, 1)")
    run.wait_for(lambda: ObservedApplyWorker.has_read_past(before))
