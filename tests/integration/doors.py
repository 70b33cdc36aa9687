"""A destination whose writes a test lets through one by one, and two tables: one that is followed, one that comes later."""

from __future__ import annotations

import threading

from headwater.contracts.results import WriteEventsResult
from headwater.engine.apply.worker import ApplyWorker
from headwater.engine.run import Run
from headwater.events import EventBatch
from headwater.lsn import EndLsn
from headwater.testing.compare import flush_position
from tests.conftest import Database
from tests.integration.mirror import MirrorDestination, Running


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
