"""A pipeline in a process of its own under steady load, while its connections are lost, its server falls silent or restarts."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from headwater.testing.compare import wait_until
from headwater.testing.postgres import PostgresServer
from tests.conftest import Database
from tests.integration.silent_proxy import SilentProxy, silent_proxy
from tests.pipeline_process import PipelineFromOutside

ANSWER_MS = 2000
TABLES = ("orders", "items", "notes")
SERVER = {
    # As short as the pipeline's own: the longer of both is how long a silent server is borne.
    "wal_sender_timeout": f"{ANSWER_MS}ms",
    "max_slot_wal_keep_size": "1GB",
}
SLACK = {
    "python_threads": 2,
    "python_sockets": 4,
    "python_files": 4,
    "python_objects": 20_000,
    "python_resident_kib": 96 << 10,
    "arrow_kib": 8 << 10,
    "jvm_threads": 8,
    "jvm_sockets": 4,
    "jvm_files": 8,
    "jvm_heap_kib": 48 << 10,
    "jvm_arrow_allocators": 0,
    "jvm_non_heap_kib": 48 << 10,
    "log_lines": 10,
    "server_sessions": 3,
    "server_slots": 0,
    "temporary_files": 4,
}
"""How much more than the most of the first round a later one may hold. What leaks by a piece a batch is far beyond it in a
round of dozens of batches; what is allowed is what comes and goes."""


class Load:
    """Writes at a steady pace until it is closed, and connects again when it has to."""

    def __init__(self, server: PostgresServer, database: str) -> None:
        self._server, self._database = server, database
        self._go, self._end = threading.Event(), threading.Event()
        self._idle = threading.Event()
        self.turns = 0
        self._thread = threading.Thread(target=self._run, name="soak-load", daemon=True)
        self._thread.start()

    @contextmanager
    def on(self) -> Iterator[None]:
        self._idle.clear()
        self._go.set()
        try:
            yield
        finally:
            self._go.clear()
            assert self._idle.wait(60)

    def close(self) -> None:
        self._end.set()
        self._go.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            self._idle.set()
            self._go.wait()
            with suppress(psycopg.Error), self._server.connect(self._database) as connection:
                while self._go.is_set() and not self._end.wait(0.02):
                    self.turns += 1
                    self._change(connection, self.turns)
            self._end.wait(0.1)

    @staticmethod
    def _change(connection: psycopg.Connection[tuple[object, ...]], turn: int) -> None:
        with connection.transaction():
            connection.execute("update orders set counter = counter + 1 where id = %s", [turn % 500 + 1])
            connection.execute("insert into items values (%s, 1)", [100_000 + turn])
            connection.execute("delete from items where id = %s", [100_000 + turn - 200])
            connection.execute(
                "update notes set id = id + 100000, body = %s where id = %s", [f"{turn}", turn % 500 + 1]
            )
            connection.execute("update notes set id = id - 100000 where id > 100000 and id %% 7 = %s", [turn % 7])


@dataclass
class Soak:
    """What is under test, with what it is disturbed by."""

    server: PostgresServer
    name: str
    proxy: SilentProxy
    directory: Path
    load: Load
    rounds: list[dict[str, int]] = field(default_factory=list)
    """What was held after each disturbance, once all was quiet and caught up."""
    _process: subprocess.Popen[bytes] | None = None
    _lines: int = 0

    @property
    def output(self) -> Path:
        return self.directory / "output.txt"

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.soak.process", str(self.directory / "pipeline.toml"), self._socket_path]
        with self.output.open("ab") as log:
            before = log.tell()
            environment = os.environ | {"TMPDIR": str(self._temp)}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        # What the database says may be an earlier run's, and a signal before this one is up is no orderly stop.
        self._wait_said(" is up", before)
        self.caught_up()

    @property
    def _temp(self) -> Path:
        return self.directory / "temp"

    @property
    def _socket_path(self) -> str:
        return str(self.directory / "measure.sock")

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(120)
        assert status == 0, f"exit status {status}\n{self.tail()}"
        self._process = None

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-6000:]

    def _wait_said(self, text: str, since: int) -> None:
        """In the output, from so many bytes on."""
        wait_until(
            lambda: text.encode() in self.output.read_bytes()[since:],
            300,
            what=f"{text!r} in the output",
            still_good=self._still_running,
        )

    def _still_running(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, self.tail()

    @contextmanager
    def _from_outside(self) -> Iterator[PipelineFromOutside]:
        """Over a session of its own: the server may have restarted since the last one."""
        with self.server.connect(self.name) as connection:
            database = Database(self.server, self.name, connection)
            yield PipelineFromOutside(database, self.directory / "lake", self._still_running)

    def caught_up(self) -> None:
        with self._from_outside() as look:
            look.wait_ready(len(TABLES), 240)
            look.wait_caught_up(240)

    def assert_equal(self) -> None:
        with self._from_outside() as look:
            look.assert_equal(*TABLES)

    # Disturbances, each ended before it returns.

    def steady(self) -> None:
        """Only the load."""

    def lost(self) -> None:
        """Every session of the pipeline is ended, twice in a row."""
        for _ in range(2):
            with self.server.connect("postgres") as connection:
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'headwater%%'"
                )

    def silent(self) -> None:
        """Sockets stay open and nothing passes, until the process has noticed."""
        before = self.output.stat().st_size
        self.proxy.silence()
        try:
            self._wait_said("does not answer", before)
        finally:
            self.proxy.resume()

    def restarted(self) -> None:
        self.server.restart(mode="fast")

    def disturb(self, how: Callable[[], None], seconds: float) -> None:
        """Load before and after, then a look at what is held when all is quiet."""
        with self.load.on():
            turns = self.load.turns
            wait_until(lambda: self.load.turns > turns + 40, 60, what="changes to be made")
            how()
            turns = self.load.turns
            wait_until(lambda: self.load.turns > turns + 40 * seconds, 60 + 60 * seconds, what="changes to be made")
        self.caught_up()
        self.rounds.append(self._held())

    def _held(self) -> dict[str, int]:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._socket_path)
            data = b"".join(iter(lambda: client.recv(65536), b""))
        found: dict[str, int] = json.loads(data)
        lines = self.output.read_bytes().count(b"\n")
        found["log_lines"], self._lines = lines - self._lines, lines
        with self.server.connect("postgres") as connection:
            ((sessions, slots),) = connection.execute(
                "select (select count(*) from pg_stat_activity where application_name like 'headwater%'),"
                " (select count(*) from pg_replication_slots)"
            ).fetchall()
        found["server_sessions"], found["server_slots"] = sessions, slots
        found["temporary_files"] = sum(path.is_file() for path in self._temp.rglob("*"))
        return found


def assert_flat(rounds: list[dict[str, int]], first: int) -> None:
    """What is held after the first `first` looks is the measure for all that follow."""
    assert len(rounds) > first
    grown = []
    for name, slack in SLACK.items():
        most, later = max(held[name] for held in rounds[:first]), [held[name] for held in rounds[first:]]
        # The last looks count: one that came in the middle of something is not growth, what stays is.
        if min(later[-first:]) > most + slack:
            grown.append(f"{name}: at most {most} in the first {first} looks, then {later}")
    assert not grown, "\n".join(grown)


@contextmanager
def soaking(directory: Path) -> Iterator[Soak]:
    with PostgresServer.start(settings=SERVER) as server:
        name = server.create_database()
        with server.connect(name) as connection:
            connection.execute(
                """
                create table orders(id int primary key, counter int not null);
                insert into orders select i, 1 from generate_series(1, 500) i;
                create table items(id int primary key, counter int not null);
                create table notes(id int primary key, body text);
                insert into notes select i, repeat('x', 3000) from generate_series(1, 500) i;
                create publication shop for table orders, items, notes;
                """
            )
        with silent_proxy(server.settings(name)) as proxy:
            _write_settings(server, name, proxy, directory)
            load = Load(server, name)
            soak = Soak(server, name, proxy, directory, load)
            try:
                yield soak
            finally:
                load.close()
                soak.end()


def _write_settings(server: PostgresServer, name: str, proxy: SilentProxy, directory: Path) -> None:
    settings = server.settings(name)
    assert settings.password is not None
    (directory / "temp").mkdir()
    (directory / "password").write_text(settings.password.reveal())
    (directory / "pipeline.toml").write_text(
        f"""
id = 1
publication_name = "shop"

[pg_connection]
host = "127.0.0.1"
port = {proxy.port}
name = {json.dumps(name)}
username = {json.dumps(settings.username)}
password = {{ file = "password" }}
answer_timeout_ms = {ANSWER_MS}

[batch]
max_fill_ms = 200

[destination]
warehouse = "lake"

[spark]
master = "local[2]"
"""
    )


def disturbances(soak: Soak) -> Iterator[Callable[[], None]]:
    return itertools.cycle((soak.steady, soak.lost, soak.silent, soak.restarted))
