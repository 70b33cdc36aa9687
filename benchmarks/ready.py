"""`headwater run` over quiet tables: from the command to the last Ready, the start of Spark included."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.setting import Clock, Figure, Setting
from headwater.testing.source_rows import Connection

TABLES = 20
MANY_TABLES = 100
ROWS = 1000
MARK_SECONDS = 90
_POLL_SECONDS = 0.05


def run(setting: Setting) -> Iterator[Figure]:
    what = "{} quiet tables to Ready, Spark's start included"
    seconds = _seconds_to_ready(setting, TABLES)
    yield Figure(what.format(TABLES), f"{seconds:.0f} s", "", f"{MARK_SECONDS} s", seconds < MARK_SECONDS)
    yield Figure(what.format(MANY_TABLES), f"{_seconds_to_ready(setting, MANY_TABLES):.0f} s")


def _seconds_to_ready(setting: Setting, tables: int) -> float:
    database = setting.database()
    with setting.server.connect(database) as connection, tempfile.TemporaryDirectory() as directory:
        for number in range(tables):
            connection.execute(f"create table t{number}(id int primary key, note text)")
            connection.execute(f"insert into t{number} select i, 'note ' || i from generate_series(1, {ROWS}) i")
        connection.execute("create publication bench for all tables")
        settings = Path(directory) / "pipeline.toml"
        connect = setting.server.settings(database)
        assert connect.password is not None
        settings.write_text(
            f'id = 1\npublication_name = "bench"\n[pg_connection]\nhost = "{connect.host}"\nport = {connect.port}\n'
            f'name = "{database}"\nusername = "{connect.username}"\npassword = {{ env = "BENCH_PASSWORD" }}\n'
            f"[destination]\nwarehouse = {json.dumps(directory + '/lake')}\n"
        )
        command = [sys.executable, "-m", "headwater.cli.main", "run", str(settings)]
        environment = {**os.environ, "BENCH_PASSWORD": connect.password.reveal()}
        clock = Clock()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        try:
            while process.poll() is None and _ready(connection) < tables:
                time.sleep(_POLL_SECONDS)
            seconds = clock.seconds
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait()
    assert status == 0, f"headwater run ended with status {status}"
    setting.server.drop_database(database)
    return seconds


def _ready(connection: Connection) -> int:
    if connection.execute("select to_regclass('headwater.table_states')").fetchone() == (None,):
        return 0
    row = connection.execute("select count(*) from headwater.table_states where state->>'phase' = 'ready'").fetchone()
    return int(row[0]) if row is not None else 0
