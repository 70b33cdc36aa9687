"""How fresh a busy table stays while a table of 5 million rows is copied beside it, against how fresh it is alone."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator

from benchmarks.setting import COLUMNS, ROW, Figure, Setting, wait_ready
from headwater.engine.pipeline import Pipeline
from headwater.testing.source_rows import Connection

ROWS = 5_000_000
BUSY_ROWS = 50_000
CHANGES = 40
WARM_UP = 10
MARK = 3.0
_PAUSE_SECONDS = 0.1
_POLL_SECONDS = 0.005
_LOOK = "select metadata_location from iceberg_tables where table_namespace = 'public' and table_name = 'busy'"


def run(setting: Setting) -> Iterator[Figure]:
    database = setting.database()
    with setting.server.connect(database) as connection:
        connection.execute(f"create table busy({COLUMNS})")
        connection.execute(f"insert into busy select {ROW} from generate_series(1, {BUSY_ROWS}) i")
        connection.execute(f"create table large({COLUMNS})")
        connection.execute(f"insert into large select {ROW} from generate_series(1, {ROWS}) i")
        connection.execute("vacuum analyze large")
        connection.execute("create publication bench for table busy")
        with setting.running(database, 41) as pipeline, sqlite3.connect(setting.warehouse / "catalog.db") as catalog:
            wait_ready(pipeline, 1)
            alone = _lags(connection, catalog, _counted(WARM_UP + CHANGES))[WARM_UP:]
            connection.execute("alter publication bench add table large")
            pipeline.progress.wait_for(lambda now: any(table.copying for table in now.tables), 60)
            # Until it is ready: the hand-off belongs to it.
            beside = _lags(connection, catalog, lambda: not _all_ready(pipeline))
            progress = pipeline.progress.snapshot()
    (large,) = (table for table in progress.tables if table.name == "public.large")
    assert large.copied_rows == ROWS, large
    alone, beside = sorted(alone), sorted(beside)
    yield Figure("commit to visible, alone, p50", f"{_middle(alone):.2f} s")
    ratio = _middle(beside) / _middle(alone)
    what = f"the same while {ROWS:,} rows are copied, p50 of {len(beside)}"
    yield Figure(what, f"{_middle(beside):.2f} s", f"{ratio:.1f} x", f"{MARK:g} x", ratio <= MARK)
    high = _high(beside) / _high(alone)
    yield Figure("p99, beside the copy and alone", f"{_high(beside):.2f} s, {_high(alone):.2f} s", f"{high:.1f} x")
    yield Figure(f"that copy of {ROWS:,} rows", f"{ROWS / large.copy_seconds:,.0f} rows/s")
    yield Figure(f"longest pause for a hand-off, of {progress.hand_offs}", f"{progress.longest_pause_seconds:.2f} s")
    setting.server.drop_database(database)


def _lags(connection: Connection, catalog: sqlite3.Connection, goes_on: Callable[[], bool]) -> list[float]:
    lags, number = [], 0
    while goes_on():
        number += 1
        before = catalog.execute(_LOOK).fetchone()
        connection.execute("update busy set score = score + 1 where id = %s", [number])
        started = time.perf_counter()
        while catalog.execute(_LOOK).fetchone() == before:
            time.sleep(_POLL_SECONDS)
        lags.append(time.perf_counter() - started)
        time.sleep(_PAUSE_SECONDS)
    return lags


def _counted(count: int) -> Callable[[], bool]:
    left = iter(range(count))
    return lambda: next(left, None) is not None


def _all_ready(pipeline: Pipeline) -> bool:
    if pipeline.stopped:
        pipeline.wait()
    states = pipeline.progress.snapshot().states()
    return len(states) == 2 and set(states.values()) == {"ready"}


def _middle(values: list[float]) -> float:
    return values[len(values) // 2]


def _high(values: list[float]) -> float:
    return values[int(len(values) * 0.99)]
