"""From commit in Postgres to visible in the lake: one row a transaction, one at a time."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from headwater.testing.source_rows import Connection

_POLL_SECONDS = 0.002
_LOOK = "select metadata_location from iceberg_tables where table_namespace = 'public' and table_name = ?"


def lags(
    connection: Connection, warehouse: Path, table: str, goes_on: Callable[[], bool], pause_seconds: float = 0.0
) -> list[float]:
    """Update one row after another while it goes on; how long each took."""
    found: list[float] = []
    with sqlite3.connect(warehouse / "catalog.db") as catalog:
        while goes_on():
            before = catalog.execute(_LOOK, (table,)).fetchone()
            statement = f"update {table} set score = score + 1 where id = %s"
            connection.execute(statement, [len(found) + 1])
            started = time.perf_counter()
            # The lake's own truth: the catalog names another metadata file once the commit is visible to any reader.
            while catalog.execute(_LOOK, (table,)).fetchone() == before:
                time.sleep(_POLL_SECONDS)
            found.append(time.perf_counter() - started)
            time.sleep(pause_seconds)
    return found


def counted(count: int) -> Callable[[], bool]:
    left = iter(range(count))
    return lambda: next(left, None) is not None


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def high(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]
