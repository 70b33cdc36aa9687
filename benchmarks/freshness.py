"""From commit in Postgres to visible in the lake, on a quiet pipeline: one row a transaction, one at a time."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator

from benchmarks.setting import COLUMNS, ROW, Figure, Setting, wait_ready

ROWS = 50_000
CHANGES = 60
MARK_SECONDS = 2.5
_POLL_SECONDS = 0.002
_LOOK = "select metadata_location from iceberg_tables where table_namespace = 'public' and table_name = 'fresh'"


def run(setting: Setting) -> Iterator[Figure]:
    database = setting.database()
    with setting.server.connect(database) as connection:
        connection.execute(f"create table fresh({COLUMNS})")
        connection.execute(f"insert into fresh select {ROW} from generate_series(1, {ROWS}) i")
        connection.execute("create publication bench for table fresh")
        lags = []
        with setting.running(database, 31) as pipeline, sqlite3.connect(setting.warehouse / "catalog.db") as catalog:
            wait_ready(pipeline, 1)
            for change in range(CHANGES):
                before = catalog.execute(_LOOK).fetchone()
                connection.execute("update fresh set score = score + 1 where id = %s", [change + 1])
                started = time.perf_counter()
                # The lake's own truth: the catalog names another metadata file once the commit is visible to any reader.
                while catalog.execute(_LOOK).fetchone() == before:
                    time.sleep(_POLL_SECONDS)
                lags.append(time.perf_counter() - started)
    # The first ones pay for code that was never run before.
    lags = sorted(lags[10:])
    p50, p99 = lags[len(lags) // 2], lags[int(len(lags) * 0.99)]
    yield Figure("commit to visible, quiet pipeline, p50", f"{p50:.2f} s", "", f"{MARK_SECONDS} s", p50 < MARK_SECONDS)
    yield Figure("commit to visible, quiet pipeline, p99", f"{p99:.2f} s")
    setting.server.drop_database(database)
