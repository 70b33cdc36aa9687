"""A transaction of 5 million rows, sent while in progress: the most memory that Python and the JVM take for it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.setting import COLUMNS, HEAP_BYTES, ROW, Figure, Setting, wait_confirmed, wait_ready
from headwater.config import BatchConfig
from headwater.engine.memory import memory_now
from headwater.testing.compare import flush_position
from headwater.testing.memory import PeakMemory

ROWS = 5_000_000
BUDGET_BYTES = 256 << 20
PYTHON_MARK = 1 << 30
"""The budget, and what the program itself takes: about 350 MB of libraries and compiled code, and a segment being decoded."""
JVM_OVERHEAD = 1 << 30
"""What a JVM takes beside its heap: classes, compiled code, threads, Arrow's and the network's buffers."""


def run(setting: Setting) -> Iterator[Figure]:
    database = setting.database()
    with setting.server.connect(database) as connection:
        connection.execute(f"create table millions({COLUMNS})")
        connection.execute(f"create table keyless({COLUMNS.replace(' primary key', '')})")
        connection.execute("alter table keyless replica identity full")
        connection.execute("create publication bench for table millions, keyless")
        ratio = BUDGET_BYTES / memory_now().total_bytes
        batch = BatchConfig(memory_budget_ratio=ratio, spool_directory=str(setting.warehouse.parent))
        with setting.running(database, 14, batch=batch) as pipeline:
            wait_ready(pipeline, 2)
            statements = {
                "inserted": f"insert into millions select {ROW} from generate_series(1, {ROWS}) i",
                "updated": "update millions set paid = not paid",
                "given another key": "update millions set id = -id",
                "inserted without a key": f"insert into keyless select {ROW} from generate_series(1, {ROWS}) i",
                "updated without a key": "update keyless set paid = not paid",
            }
            for what, statement in statements.items():
                with PeakMemory() as python, PeakMemory(setting.jvm) as jvm:
                    connection.execute(statement)
                    wait_confirmed(pipeline, flush_position(connection))
                for name, peak, mark in (
                    ("Python", python.bytes, PYTHON_MARK),
                    ("JVM", jvm.bytes, HEAP_BYTES + JVM_OVERHEAD),
                ):
                    yield Figure(
                        f"{name}, {ROWS:,} rows {what} in one transaction",
                        f"{peak / 2**20:,.0f} MiB",
                        "",
                        f"{mark / 2**20:,.0f} MiB",
                        peak <= mark,
                    )
    setting.server.drop_database(database)
