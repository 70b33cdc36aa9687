"""An embedded Postgres server: for tests, and for the demo.

Starts in a fraction of a second, as root or as an ordinary user, several at once. It ends with the process that started
it, also when that process is killed: a watchdog waits on a pipe for that. The Unix socket is closed to other users and
needs no password; TCP on the loopback address asks for a password that only `settings()` has.
"""

from __future__ import annotations

import atexit
import os
import random
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psycopg
from psycopg import sql

from headwater.errors import HeadwaterError
from headwater.secret import Secret
from headwater.testing import binaries
from headwater.testing.binaries import Installation
from headwater.testing.runtime import ServerDirectory, ServerUser, runnable, start_watchdog
from headwater.testing.server_files import DEFAULT_HBA, TRUSTED_SOCKET, ServerFiles, ServerTls
from headwater.testing.template import SUPERUSER, make_data_directory, server_environment
from headwater.wire.settings import ConnectSettings

StopMode = Literal["smart", "fast", "immediate"]
_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_START_SECONDS = 60.0
_STOP_SECONDS = 60.0


class PostgresServer:
    """One running server. Use as a context manager, or call `close()`; at the latest it ends with this process."""

    host: str
    port: int
    tcp_host = "127.0.0.1"
    superuser = SUPERUSER

    def __init__(self, installation: Installation, user: ServerUser, directory: ServerDirectory, password: str) -> None:
        """Not for callers: use `start()`."""
        self._installation = installation
        self._user = user
        self._directory = directory
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._watchdog = start_watchdog(directory)
        self.host = str(directory.path)
        addresses = {"listen_addresses": self.tcp_host, "unix_socket_directories": self.host}
        self._files = ServerFiles(user, directory.data, addresses)
        self.port = 0
        _servers.add(self)

    @classmethod
    def start(
        cls,
        *,
        version: int | None = None,
        settings: Mapping[str, str] | None = None,
        directory: Path | None = None,
        hba: Sequence[str] | None = None,
        tls: ServerTls | None = None,
        password: str | None = None,
    ) -> PostgresServer:
        """Start a server of a major version, by default the newest pinned one.

        `directory` keeps its files: they are used again if it holds a `data` directory, and stay after the end. Without
        it they are temporary. `settings` go into postgresql.conf after ours. `password` is the superuser's over TCP,
        random by default.
        """
        user = ServerUser.current()
        installation = runnable(binaries.find(version))
        files = ServerDirectory.create(user, directory)
        server = cls(installation, user, files, password if password is not None else secrets.token_urlsafe(18))
        try:
            if not (files.data / "PG_VERSION").exists():
                make_data_directory(installation, user, files.data)
            server._files.configure(settings or {}, tls)
            server._files.write_hba(DEFAULT_HBA if hba is None else hba)
            server._launch_on_a_free_port()
            server._set_password()
        except BaseException:
            server.close()
            raise
        return server

    @property
    def version(self) -> int:
        """As server_version_num: 180006 for 18.6."""
        return self._installation.version

    @property
    def data_directory(self) -> Path:
        return self._directory.data

    @property
    def pid(self) -> int | None:
        """The server's process, or None while it is stopped."""
        return None if self._process is None else self._process.pid

    @property
    def log(self) -> str:
        return self._directory.log.read_text(errors="replace")

    def program(self, name: str) -> Path:
        """A client program of this server's version, such as pg_dump; not every source of binaries brings them."""
        return self._installation.program(name)

    def settings(self, database: str = "postgres", *, tcp: bool = True, **overrides: Any) -> ConnectSettings:
        """How to connect: by TCP with the superuser's password, or by the Unix socket, which trusts every role.

        A role made by a test has no password, so it connects with `tcp=False`.
        """
        found = ConnectSettings(
            host=self.tcp_host if tcp else self.host,
            port=self.port,
            database=database,
            username=self.superuser,
            password=Secret(self._password) if tcp else None,
        )
        return replace(found, **overrides)

    def connect(self, database: str = "postgres", **arguments: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """An ordinary session of the superuser through the Unix socket, in autocommit by default."""
        return psycopg.connect(
            **{
                "host": self.host,
                "port": self.port,
                "dbname": database,
                "user": self.superuser,
                "autocommit": True,
                **arguments,
            }
        )

    def create_database(self, *, template: str | None = None) -> str:
        """A database of a new name; a copy of `template`, to which no session may be connected, or of template1."""
        name = f"hw_{secrets.token_hex(6)}"
        statement = sql.SQL("create database {} template {}").format(
            sql.Identifier(name), sql.Identifier(template or "template1")
        )
        with self.connect() as connection:
            connection.execute(statement)
        return name

    def drop_database(self, name: str) -> None:
        """Drop it and end its sessions. A database with replication slots cannot be dropped, so these are dropped first."""
        with self.connect() as connection:
            exists = connection.execute("select from pg_database where datname = %s", [name]).fetchone()
            if exists is None:
                return
            # A client that reconnects would take its slot again between two of our statements.
            connection.execute(sql.SQL("alter database {} allow_connections false").format(sql.Identifier(name)))
            connection.execute(
                "select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = %s", [name]
            )
            connection.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s", [name]
            )
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def set_hba(self, lines: Sequence[str]) -> None:
        """Replace pg_hba.conf and apply it. The Unix socket stays trusted, or this object couldn't connect any more."""
        self._files.write_hba((TRUSTED_SOCKET, *lines))
        self.reload()

    def reload(self) -> None:
        """Apply changed settings to new sessions: returns once the server has read them."""
        with self.connect() as connection:
            before = connection.execute("select pg_conf_load_time()").fetchone()
            connection.execute("select pg_reload_conf()")
            deadline = time.monotonic() + 10
            # The server reads its files on a signal, so pg_reload_conf returns too early; a new session shows the time.
            while time.monotonic() < deadline:
                with self.connect() as fresh:
                    if fresh.execute("select pg_conf_load_time()").fetchone() != before:
                        return

    def stop(self, mode: StopMode = "fast") -> None:
        """End the server and keep its files; `restart()` brings it back. `immediate` is a crash to the server."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(_SIGNALS[mode])
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise HeadwaterError(
                "the embedded Postgres server does not stop",
                detail=f"a {mode} stop took more than {_STOP_SECONDS:.0f} s; a replication client may not be reading",
                hint="Close its clients first, or stop it with mode immediate.",
            ) from None
        self._process = None

    def restart(self, *, mode: StopMode = "fast") -> None:
        """Stop it if it runs, and start it on the same port."""
        self.stop(mode)
        self._launch()

    def close(self) -> None:
        """End the server for good, and remove its files unless the caller chose their place. May be called twice."""
        _servers.discard(self)
        if self._owner != os.getpid() or self._watchdog.stdin is None or self._watchdog.stdin.closed:
            return
        try:
            # An orderly stop only serves files that stay.
            self.stop("immediate" if self._directory.temporary else "fast")
        finally:
            self._directory.release()
            self._watchdog.stdin.close()
            self._watchdog.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PostgresServer {self.version} port={self.port} pid={self.pid}>"

    def _launch_on_a_free_port(self) -> None:
        for attempt in range(20):
            self.port = _free_port()
            try:
                self._launch()
                return
            except _PortTaken:
                if attempt == 19:
                    raise

    def _launch(self) -> None:
        command = [str(self._installation.program("postgres")), "-D", str(self.data_directory), "-p", str(self.port)]
        with open(self._directory.log, "ab") as log:
            already = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory.path,
                env=server_environment(),
                start_new_session=True,
                **self._user.process_arguments(),
            )
        self._wait_until_ready(already)

    def _wait_until_ready(self, log_start: int) -> None:
        process = self._process
        assert process is not None
        status = self.data_directory / "postmaster.pid"
        deadline = time.monotonic() + _START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                lines = status.read_text().splitlines()
                # The eighth line is where the server says so, for pg_ctl; a stale file names another process first.
                if len(lines) >= 8 and lines[0] == str(process.pid) and lines[7].strip() in ("ready", "standby"):
                    return
            # It is reported nowhere else, so the file is what to wait for.
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        self._process = None
        said = self._directory.log.read_bytes()[log_start:].decode(errors="replace")
        if "could not create any TCP/IP sockets" in said:
            raise _PortTaken("no free port for the embedded Postgres server", detail=said.strip())
        raise HeadwaterError(
            f"the embedded Postgres {self._installation.major} server did not start",
            detail=said.strip()[-2000:],
            hint="See the last lines of its log above; one of your settings may not be valid for this version.",
        )

    def _set_password(self) -> None:
        with self.connect() as connection:
            if connection.execute("select pg_is_in_recovery()").fetchone() == (True,):
                return
            statement = sql.SQL("alter role {} password {}")
            connection.execute(statement.format(sql.Identifier(self.superuser), sql.Literal(self._password)))


class _PortTaken(HeadwaterError):
    """Another process took the port between our check and the server's bind."""


def _free_port() -> int:
    # Below the range the kernel gives to outgoing connections, so that none of these takes the port during a restart.
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind((PostgresServer.tcp_host, port))
                return port


_servers: set[PostgresServer] = set()


@atexit.register
def _close_all() -> None:
    for server in list(_servers):
        server.close()


def _let_go_after_fork() -> None:
    # A forked child holding the pipe would keep the watchdog from seeing our end.
    for server in list(_servers):
        server._directory.let_go_after_fork()
        if server._watchdog.stdin is not None:
            os.close(server._watchdog.stdin.fileno())


os.register_at_fork(after_in_child=_let_go_after_fork)
