"""How fresh a busy table stays while a table of 5 million rows is copied beside it, against how fresh it is alone."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.setting import COLUMNS, ROW, Figure, Setting, wait_ready
from benchmarks.visible import counted, high, lags, middle
from headwater.engine.pipeline import Pipeline

ROWS = 5_000_000
BUSY_ROWS = 50_000
CHANGES = 40
WARM_UP = 10
MARK = 3.0
_PAUSE_SECONDS = 0.1


def run(setting: Setting) -> Iterator[Figure]:
    database = setting.database()
    with setting.server.connect(database) as connection:
        connection.execute(f"create table busy({COLUMNS})")
        connection.execute(f"insert into busy select {ROW} from generate_series(1, {BUSY_ROWS}) i")
        connection.execute(f"create table large({COLUMNS})")
        connection.execute(f"insert into large select {ROW} from generate_series(1, {ROWS}) i")
        connection.execute("vacuum analyze large")
        connection.execute("create publication bench for table busy")
        with setting.running(database, 41) as pipeline:
            wait_ready(pipeline, 1)
            alone = lags(connection, setting.warehouse, "busy", counted(WARM_UP + CHANGES), _PAUSE_SECONDS)[WARM_UP:]
            connection.execute("alter publication bench add table large")
            pipeline.progress.wait_for(lambda now: any(table.copying for table in now.tables), 60)
            # Until it is ready: the hand-off belongs to it.
            beside = lags(connection, setting.warehouse, "busy", lambda: not _all_ready(pipeline), _PAUSE_SECONDS)
            progress = pipeline.progress.snapshot()
    (large,) = (table for table in progress.tables if table.name == "public.large")
    assert large.copied_rows == ROWS, large
    yield Figure("commit to visible, alone, p50", f"{middle(alone):.2f} s")
    ratio = middle(beside) / middle(alone)
    what = f"the same while {ROWS:,} rows are copied, p50 of {len(beside)}"
    yield Figure(what, f"{middle(beside):.2f} s", f"{ratio:.1f} x", f"{MARK:g} x", ratio <= MARK)
    highest = high(beside) / high(alone)
    yield Figure("p99, beside the copy and alone", f"{high(beside):.2f} s, {high(alone):.2f} s", f"{highest:.1f} x")
    yield Figure(f"that copy of {ROWS:,} rows", f"{ROWS / large.copy_seconds:,.0f} rows/s")
    yield Figure(f"longest pause for a hand-off, of {progress.hand_offs}", f"{progress.longest_pause_seconds:.2f} s")
    setting.server.drop_database(database)


def _all_ready(pipeline: Pipeline) -> bool:
    if pipeline.stopped:
        pipeline.wait()
    states = pipeline.progress.snapshot().states()
    return len(states) == 2 and set(states.values()) == {"ready"}
