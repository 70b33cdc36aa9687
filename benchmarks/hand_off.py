"""How long busy tables stand still while other busy tables are handed over to them, against what a batch of all takes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.setting import COLUMNS, ROW, Figure, Setting, wait_ready

FOLLOWED = ("one", "two")
JOINING = ("three", "four", "small_five", "small_six")
ROWS = 100_000
SMALL_ROWS = 20_000
BATCHES = 8
MARK = 1.5
_PACE_SECONDS = 0.02


def run(setting: Setting) -> Iterator[Figure]:
    database = setting.database()
    with setting.server.connect(database) as connection:
        for name in (*FOLLOWED, *JOINING):
            rows = SMALL_ROWS if name.startswith("small") else ROWS
            connection.execute(f"create table {name}({COLUMNS})")
            connection.execute(f"insert into {name} select {ROW} from generate_series(1, {rows}) i")
        connection.execute(f"create publication bench for table {', '.join(FOLLOWED)}")
        with setting.running(database, 61) as pipeline, _writing(setting, database):
            wait_ready(pipeline, len(FOLLOWED))
            connection.execute(f"alter publication bench add table {', '.join(JOINING)}")
            wait_ready(pipeline, len(FOLLOWED) + len(JOINING))
            handed = pipeline.progress.snapshot()
            began = time.perf_counter()
            pipeline.progress.wait_for(lambda now: now.batches >= handed.batches + BATCHES, 600)
            batch_seconds = (time.perf_counter() - began) / BATCHES
    pause = handed.longest_pause_seconds
    what = f"longest pause for a hand-off of busy tables, of {handed.hand_offs}"
    yield Figure(what, f"{pause:.2f} s", f"{pause / batch_seconds:.2f} x", f"{MARK:g} x", pause <= MARK * batch_seconds)
    yield Figure("a batch of all six tables, afterwards", f"{batch_seconds:.2f} s")
    setting.server.drop_database(database)


@contextmanager
def _writing(setting: Setting, database: str) -> Iterator[None]:
    """Small transactions over all tables, at a steady pace."""
    stop, choose = threading.Event(), random.Random(1)

    def write() -> None:
        with setting.server.connect(database) as connection:
            while not stop.wait(_PACE_SECONDS):
                name = choose.choice((*FOLLOWED, *JOINING))
                statement = f"update {name} set score = score + 1 where id = %s"
                connection.execute(statement, [choose.randrange(1, SMALL_ROWS)])

    thread = threading.Thread(target=write, name="writer")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
