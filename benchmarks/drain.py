"""A backlog of inserts drained into Iceberg, against pg_recvlogical over a Unix socket to nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from benchmarks.setting import COLUMNS, ROW, Clock, Figure, Setting, wait_confirmed, wait_ready
from headwater.lsn import EndLsn
from headwater.testing.compare import flush_position
from headwater.testing.source_rows import Connection

ROWS = 1_000_000
MARK = 0.2
_TRANSACTION_ROWS = 1000


def run(setting: Setting) -> Iterator[Figure]:
    database = setting.database()
    with setting.server.connect(database) as connection:
        connection.execute(f"create table events({COLUMNS})")
        connection.execute("create publication bench for table events")
        # The lake table exists and holds a row, as it would; the merge path is warm.
        connection.execute(f"insert into events select {ROW} from generate_series(0, 0) i")
        with setting.running(database, 11) as pipeline:
            wait_ready(pipeline, 1)
            connection.execute(f"insert into events select {ROW} from generate_series(1, 1000) i")
            wait_confirmed(pipeline, flush_position(connection))
        connection.execute("select pg_create_logical_replication_slot('peer', 'pgoutput')")
        for first in range(1001, ROWS + 1001, _TRANSACTION_ROWS):
            last = first + _TRANSACTION_ROWS - 1
            connection.execute(f"insert into events select {ROW} from generate_series({first}, {last}) i")
        connection.execute("checkpoint")
        position = flush_position(connection)
        peer = _receive(setting, database, connection)
        pipeline = setting.pipeline(database, 11)
        clock = Clock()
        pipeline.start()
        wait_confirmed(pipeline, position)
        ours = clock.seconds
        pipeline.shutdown()
        pipeline.wait()
    yield Figure("pg_recvlogical, Unix socket, to /dev/null", f"{ROWS / peer:,.0f} rows/s")
    ratio = peer / ours
    yield Figure(
        "backlog of 1,000,000 inserts into Iceberg",
        f"{ROWS / ours:,.0f} rows/s",
        f"{ratio:.2f} x",
        f"{MARK} x",
        ratio >= MARK,
    )
    setting.server.drop_database(database)


def _receive(setting: Setting, database: str, connection: Connection) -> float:
    end = EndLsn(flush_position(connection))
    command = [str(setting.server.program("pg_recvlogical")), "--start", "--slot", "peer", "--file", "/dev/null"]
    command += ["--dbname", database, "--host", setting.server.host, "--port", str(setting.server.port), "--no-loop"]
    command += ["--username", setting.server.superuser, "--endpos", str(end), "--status-interval", "1"]
    command += ["-o", "proto_version=1", "-o", "publication_names=bench", "-o", "binary=true"]
    clock = Clock()
    subprocess.run(command, check=True, capture_output=True)
    seconds = clock.seconds
    connection.execute("select pg_drop_replication_slot('peer')")
    return seconds
