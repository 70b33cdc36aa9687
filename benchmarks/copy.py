"""A copy of 2 million rows, against two parallel COPYs to nothing and against Spark's JDBC reader into Iceberg."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from benchmarks.setting import COLUMNS, ROW, Clock, Figure, Setting, wait_ready

ROWS = 2_000_000
MARK_COPY, MARK_JDBC = 0.2, 1.0


def run(setting: Setting) -> Iterator[Figure]:
    database = setting.database()
    with setting.server.connect(database) as connection:
        connection.execute(f"create table events({COLUMNS})")
        connection.execute(f"insert into events select {ROW} from generate_series(1, {ROWS}) i")
        connection.execute("vacuum analyze events")
        connection.execute("create publication bench for table events")
    # Everyone is warm: Python workers, code caches, the server's buffers.
    _ours(setting, database, 20)
    _jdbc(setting, database)
    ours = _ours(setting, database, 21)
    jdbc = _jdbc(setting, database)
    peer = _two_copies(setting, database)
    yield Figure("two parallel COPY (FORMAT binary) to /dev/null", f"{ROWS / peer:,.0f} rows/s")
    yield Figure("Spark's JDBC reader into Iceberg", f"{ROWS / jdbc:,.0f} rows/s")
    value = f"{ROWS / ours:,.0f} rows/s"
    yield Figure(
        "copy of 2,000,000 rows, against COPY",
        value,
        f"{peer / ours:.2f} x",
        f"{MARK_COPY} x",
        peer / ours >= MARK_COPY,
    )
    yield Figure(
        "copy of 2,000,000 rows, against JDBC",
        value,
        f"{jdbc / ours:.2f} x",
        f"{MARK_JDBC} x",
        jdbc / ours >= MARK_JDBC,
    )
    setting.server.drop_database(database)


def _ours(setting: Setting, database: str, id: int) -> float:
    """Seconds from the plan to the published copy; the slot and the hand-off are not the copy's."""
    setting.spark.sql("drop table if exists lake.public.events purge")
    with setting.running(database, id) as pipeline:
        wait_ready(pipeline, 1)
        (table,) = pipeline.progress.snapshot().tables
    assert table.copied_rows == ROWS, table
    return table.copy_seconds


def _jdbc(setting: Setting, database: str) -> float:
    connect = setting.server.settings(database)
    assert connect.password is not None
    clock = Clock()
    reader = setting.spark.read.format("jdbc").option(
        "url", f"jdbc:postgresql://{connect.host}:{connect.port}/{database}"
    )
    reader = (
        reader.option("dbtable", "events")
        .option("user", connect.username)
        .option("password", connect.password.reveal())
    )
    reader = reader.option("partitionColumn", "id").option("lowerBound", 1).option("upperBound", ROWS)
    rows = (
        reader.option("numPartitions", 4).option("fetchsize", 10_000).option("driver", "org.postgresql.Driver").load()
    )
    rows.writeTo("lake.public.events_jdbc").createOrReplace()
    return clock.seconds


def _two_copies(setting: Setting, database: str) -> float:
    with setting.server.connect(database) as connection:
        row = connection.execute("select pg_relation_size('events') / 8192 / 2").fetchone()
    assert row is not None
    middle = row[0]
    halves = [f"ctid < '({middle},0)'::tid", f"ctid >= '({middle},0)'::tid"]
    base = [str(setting.server.program("psql")), "-h", setting.server.host, "-p", str(setting.server.port)]
    base += ["-U", setting.server.superuser, "-d", database, "-c"]
    clock = Clock()
    running = [
        subprocess.Popen(
            [*base, f"copy (select * from only events where {half}) to stdout (format binary)"],
            stdout=subprocess.DEVNULL,
        )
        for half in halves
    ]
    for process in running:
        assert process.wait() == 0
    return clock.seconds
