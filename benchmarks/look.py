"""The server's time for one look at the catalog: what a pipeline asks every few seconds, whether anything changed or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.setting import Clock, Figure, Setting
from headwater.source.catalog_look import CatalogLooks
from headwater.source.session import connect

TABLES = 1000
COLUMNS = 20
LOOKS = 40
MARK_MS = 50


def run(setting: Setting) -> Iterator[Figure]:
    database = setting.database()
    _make_tables(setting, database)
    with connect(setting.server.settings(database)) as connection:
        # The first look reads all in full and fills the session's caches of the catalog; a pipeline keeps its session.
        looks = CatalogLooks("bench")
        assert len(looks.look(connection).tables) == TABLES
        backend, clock = connection.info.backend_pid, Clock()
        before = _processor_seconds(backend)
        for _ in range(LOOKS):
            looks.look(connection)
        server = (_processor_seconds(backend) - before) / LOOKS * 1000
        whole = clock.seconds / LOOKS * 1000
    setting.server.drop_database(database)
    what = f"a look at {TABLES:,} tables of {COLUMNS} columns"
    yield Figure(f"{what}, the server's time", f"{server:.0f} ms", "", f"{MARK_MS} ms", server < MARK_MS)
    yield Figure(f"{what}, until its answer is read", f"{whole:.0f} ms")


def _make_tables(setting: Setting, database: str) -> None:
    columns = ", ".join(f"c{number} int" for number in range(1, COLUMNS))
    with setting.server.connect(database) as connection:
        for number in range(TABLES):
            connection.execute(f"create table t{number}(id int primary key, {columns})")
        connection.execute("create publication bench for all tables")
        connection.execute("vacuum analyze")


def _processor_seconds(pid: int) -> float:
    """What a process has used so far, in user and system mode; its ticks of 10 ms are spread over many looks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
