"""From commit in Postgres to visible in the lake, on a quiet pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.setting import COLUMNS, ROW, Figure, Setting, wait_ready
from benchmarks.visible import counted, high, lags, middle

ROWS = 50_000
CHANGES = 50
WARM_UP = 10
MARK_SECONDS = 2.5


def run(setting: Setting) -> Iterator[Figure]:
    database = setting.database()
    with setting.server.connect(database) as connection:
        connection.execute(f"create table fresh({COLUMNS})")
        connection.execute(f"insert into fresh select {ROW} from generate_series(1, {ROWS}) i")
        connection.execute("create publication bench for table fresh")
        with setting.running(database, 31) as pipeline:
            wait_ready(pipeline, 1)
            # The first ones pay for code that was never run before.
            found = lags(connection, setting.warehouse, "fresh", counted(WARM_UP + CHANGES))[WARM_UP:]
    p50, p99 = middle(found), high(found)
    yield Figure("commit to visible, quiet pipeline, p50", f"{p50:.2f} s", "", f"{MARK_SECONDS} s", p50 < MARK_SECONDS)
    yield Figure("commit to visible, quiet pipeline, p99", f"{p99:.2f} s")
    setting.server.drop_database(database)
