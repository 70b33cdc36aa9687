"""One copied row and one streamed UPDATE through `headwater run`, and the modules that each executes, by thread.

A table is followed already, so what only a start does is over. Then a table with one row joins the publication, which is
recorded until it is ready and its slot is gone; then its row is updated, which is recorded until that is confirmed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import headwater
from headwater.testing.compare import wait_until
from tests.conftest import Database
from tests.pipeline_process import pipeline_process

RECORDER = Path(__file__).parent / "recorder"
SPARK_WORKER = "Spark's Python workers"
COPY, UPDATE = "copy", "update"


@dataclass(frozen=True, slots=True)
class Called:
    """The first call of a function in a thread."""

    at: float
    thread: str
    module: str
    function: str


class Recording:
    """What processes with `environ` write down, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(RECORDER),
            "HEADWATER_WALKS": str(directory),
            "HEADWATER_WALKS_PACKAGE": str(Path(headwater.__file__).parent),
        }

    @contextmanager
    def of(self, walk: str) -> Iterator[None]:
        current = self._directory / "current"
        current.mkdir()
        yield
        current.rename(self._directory / walk)

    def calls(self, walk: str, driver_pid: int) -> list[Called]:
        """In order of time. All processes but the driver are Spark's Python workers."""
        calls = []
        for file in (self._directory / walk).iterdir():
            for line in file.read_text(encoding="utf-8").splitlines():
                call = Called(**json.loads(line))
                thread = call.thread if int(file.name) == driver_pid else SPARK_WORKER
                calls.append(Called(call.at, thread, call.module, call.function))
        return sorted(calls, key=lambda call: call.at)


def record(database: Database, directory: Path) -> dict[str, list[Called]]:
    database.execute(
        """
        create table followed(id int primary key, v text);
        create table joins(id int primary key, v text);
        insert into followed values (1, 'one');
        insert into joins values (1, 'one');
        create publication shop for table followed;
        """
    )
    recording = Recording(directory / "walks")
    with pipeline_process(database, directory, verbose=False, environ=recording.environ) as run:
        run.start()
        pid = run.pid
        run.wait_ready(1)
        database.execute("update followed set v = 'two'")
        run.wait_caught_up()
        with recording.of(COPY):
            database.execute("alter publication shop add table joins")
            run.wait_ready(2)
            wait_until(lambda: _slots(database) == 1, 60, what="the slot of the copy to be dropped")
        run.wait_caught_up()
        with recording.of(UPDATE):
            database.execute("update joins set v = 'two'")
            run.wait_caught_up()
        run.assert_equal("followed", "joins")
        assert run.stop() == 0, run.output
    return {walk: recording.calls(walk, pid) for walk in (COPY, UPDATE)}


def _slots(database: Database) -> int:
    return int(database.value("select count(*) from pg_replication_slots where database = current_database()"))
