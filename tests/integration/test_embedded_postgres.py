from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
import trustme

from headwater.errors import HeadwaterError
from headwater.secret import Secret
from headwater.testing import runtime
from headwater.testing.binaries import PINNED
from headwater.testing.compare import wait_until
from headwater.testing.postgres import PostgresServer, _free_port
from headwater.testing.server_files import ServerTls
from headwater.wire.tls_config import TlsConfig, TlsMode


def is_running(pid: int) -> bool:
    # A zombie has no working directory, and is what a killed child of a dead parent may stay where nobody reaps.
    return Path(f"/proc/{pid}/cwd").is_dir()


def test_a_server_is_ready_for_logical_replication(pg_server: PostgresServer) -> None:
    with pg_server.connect() as connection:
        assert connection.execute("show wal_level").fetchone() == ("logical",)
        assert connection.execute("show server_version_num").fetchone() == (str(pg_server.version),)
        assert connection.execute("show data_directory").fetchone() == (str(pg_server.data_directory),)


def test_tcp_asks_for_the_password_that_settings_carry(pg_server: PostgresServer) -> None:
    settings = pg_server.settings()
    with psycopg.connect(**settings.conninfo()) as connection:
        assert connection.execute("select inet_server_port()").fetchone() == (pg_server.port,)
    wrong = replace(settings, password=Secret("wrong"))
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(**wrong.conninfo())


def test_every_role_connects_through_the_socket(pg_server: PostgresServer) -> None:
    with pg_server.connect() as connection:
        connection.execute("create role guest login")
        with psycopg.connect(**pg_server.settings(tcp=False, username="guest").conninfo()) as guest:
            assert guest.execute("select current_user").fetchone() == ("guest",)
        connection.execute("drop role guest")


def test_a_database_is_dropped_with_its_slots_and_the_sessions_that_use_them(pg_server: PostgresServer) -> None:
    name = pg_server.create_database()
    with pg_server.connect(name) as connection:
        connection.execute("select pg_create_logical_replication_slot('idle', 'pgoutput')")
        connection.execute("select pg_create_logical_replication_slot('used', 'pgoutput')")
        connection.execute("create publication p for all tables")
    streaming = psycopg.connect(
        host=pg_server.host, port=pg_server.port, user="postgres", dbname=name, replication="database", autocommit=True
    )
    with closing(streaming):
        streaming.pgconn.send_query(
            b"START_REPLICATION SLOT used LOGICAL 0/0 (proto_version '1', publication_names 'p')"
        )
        with pg_server.connect() as connection:
            active = "select active from pg_replication_slots where slot_name = 'used'"
            wait_until(lambda: connection.execute(active).fetchone() == (True,))
        pg_server.drop_database(name)
    with pg_server.connect() as connection:
        assert connection.execute("select from pg_database where datname = %s", [name]).fetchone() is None
        assert connection.execute("select from pg_replication_slots where database = %s", [name]).fetchone() is None
    pg_server.drop_database(name)


def test_a_database_can_be_copied_from_a_template(pg_server: PostgresServer) -> None:
    template = pg_server.create_database()
    with pg_server.connect(template) as connection:
        connection.execute("create table t as select 7 as a")
    copy = pg_server.create_database(template=template)
    with pg_server.connect(copy) as connection:
        assert connection.execute("select a from t").fetchone() == (7,)
    pg_server.drop_database(copy)
    pg_server.drop_database(template)


def test_several_servers_run_at_once_and_are_not_the_same_system() -> None:
    identifier = "select system_identifier from pg_control_system()"
    with PostgresServer.start() as first, PostgresServer.start() as second:
        assert first.port != second.port
        with first.connect() as one, second.connect() as two:
            assert one.execute(identifier).fetchone() != two.execute(identifier).fetchone()


def test_a_crash_and_a_restart_keep_what_was_committed() -> None:
    with PostgresServer.start() as server:
        port, pid = server.port, server.pid
        with server.connect() as connection:
            connection.execute("create table t as select 1 as a")
        server.restart(mode="immediate")
        assert server.port == port
        assert server.pid != pid
        with server.connect() as connection:
            assert connection.execute("select a from t").fetchone() == (1,)
        assert "database system was interrupted" in server.log or "not properly shut down" in server.log
        server.stop()
        assert server.pid is None
        with pytest.raises(psycopg.OperationalError):
            server.connect()
        server.restart()
        with server.connect() as connection:
            assert connection.execute("select a from t").fetchone() == (1,)


def test_closing_removes_the_server_and_its_files() -> None:
    server = PostgresServer.start()
    pid, directory = server.pid, server.data_directory.parent
    assert pid is not None
    server.close()
    assert not is_running(pid)
    assert not directory.exists()
    server.close()


def test_a_directory_of_the_callers_stays_and_is_used_again(tmp_path: Path) -> None:
    directory = runtime.runtime_directory() / f"kept-{tmp_path.name}-{os.getpid()}"
    try:
        with PostgresServer.start(directory=directory) as server, server.connect() as connection:
            connection.execute("create table t as select 5 as a")
        with PostgresServer.start(directory=directory) as server, server.connect() as connection:
            assert connection.execute("select a from t").fetchone() == (5,)
            with psycopg.connect(**server.settings().conninfo()) as by_password:
                assert by_password.execute("select 1").fetchone() == (1,)
    finally:
        subprocess.run(["rm", "-rf", str(directory)], check=True)


def test_settings_of_the_caller_override_ours_and_bad_ones_are_reported() -> None:
    settings = {"wal_sender_timeout": "3s", "max_replication_slots": "3"}
    with PostgresServer.start(settings=settings) as server, server.connect() as connection:
        assert connection.execute("show wal_sender_timeout").fetchone() == ("3s",)
        assert connection.execute("show max_replication_slots").fetchone() == ("3",)
    with pytest.raises(HeadwaterError, match="did not start") as caught:
        PostgresServer.start(settings={"no_such_setting": "it's"})
    assert "no_such_setting" in caught.value.detail


def test_set_hba_is_in_force_when_it_returns() -> None:
    with PostgresServer.start() as server:
        server.set_hba(["host all all 127.0.0.1/32 reject"])
        with pytest.raises(psycopg.OperationalError, match="rejects connection"):
            psycopg.connect(**server.settings().conninfo())
        server.set_hba(["host all all 127.0.0.1/32 trust"])
        psycopg.connect(**server.settings(password=None).conninfo()).close()


def test_a_server_with_tls_shows_its_certificate() -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    tls = ServerTls(issued.cert_chain_pems[0].bytes().decode(), issued.private_key_pem.bytes().decode())
    roots = authority.cert_pem.bytes().decode()
    with PostgresServer.start(tls=tls) as server:
        settings = server.settings(tls=TlsConfig(mode=TlsMode.VERIFY_FULL, trusted_root_certs=roots))
        with psycopg.connect(**settings.conninfo()) as connection:
            assert connection.execute("select ssl from pg_stat_ssl where pid = pg_backend_pid()").fetchone() == (True,)


def test_a_port_that_is_in_use_is_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch, pg_server: PostgresServer
) -> None:
    ports = iter([pg_server.port, pg_server.port])
    free = _free_port()
    monkeypatch.setattr("headwater.testing.postgres._free_port", lambda: next(ports, free))
    with PostgresServer.start() as server:
        assert server.port == free


PARENT = """
import sys, time
from headwater.testing.compare import wait_until
from headwater.testing.postgres import PostgresServer
server = PostgresServer.start()
print(server.pid, server.data_directory.parent, flush=True)
sys.stdin.read()
"""


@pytest.mark.crash
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_with_its_parent_however_that_dies(death: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        assert is_running(int(pid))
        parent.send_signal(death)
        parent.wait(30)
    wait_until(lambda: not is_running(int(pid)) and not Path(directory).exists())


FORKING_PARENT = """
import os, sys, time
from headwater.testing.compare import wait_until
from headwater.testing.postgres import PostgresServer
server = PostgresServer.start()
child = os.fork()
if child == 0:
    time.sleep(600)
print(server.pid, child, flush=True)
sys.stdin.read()
"""


@pytest.mark.crash
def test_a_forked_child_that_lives_on_does_not_keep_the_server() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKING_PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, child = map(int, parent.stdout.readline().split())
        parent.kill()
        parent.wait(30)
        try:
            wait_until(lambda: not is_running(pid))
            assert is_running(child)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.crash
def test_what_a_crash_of_the_machine_left_is_swept_at_the_next_start() -> None:
    servers = runtime.runtime_directory() / "servers"
    servers.mkdir(exist_ok=True)
    left = servers / f"left-{os.getpid()}"
    (left / "data").mkdir(parents=True)
    (left / "data" / "postmaster.pid").write_text(f"{os.getpid()}\n")
    with PostgresServer.start() as server, PostgresServer.start():
        assert not left.exists()
        assert server.data_directory.exists()


STARTER = """
from headwater.testing.compare import wait_until
from headwater.testing.postgres import PostgresServer
with PostgresServer.start() as server, server.connect() as connection:
    print(*connection.execute("select 1").fetchone())
"""


def test_processes_may_race_to_start_servers() -> None:
    starters = [subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [starter.communicate(timeout=60)[0] for starter in starters] == ["1\n"] * 3


@pytest.mark.versions
@pytest.mark.parametrize("version", sorted(PINNED))
def test_every_pinned_version_starts(version: int) -> None:
    with PostgresServer.start(version=version) as server, server.connect() as connection:
        assert server.version // 10_000 == version
        assert connection.execute("select 1").fetchone() == (1,)
        server.drop_database(server.create_database())
