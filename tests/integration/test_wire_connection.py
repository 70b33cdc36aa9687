"""Our own connection against real servers: who gets in and who doesn't, TLS, COPY, and the replication stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trustme

from headwater.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLost,
    PrivilegeError,
    Retry,
    ServerError,
    SlotError,
    SourceSettingsError,
)
from headwater.lsn import EndLsn
from headwater.secret import Secret
from headwater.testing.compare import wait_until
from headwater.testing.postgres import PostgresServer
from headwater.testing.server_files import ServerTls
from headwater.wire.chunks import Chunk
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls_config import TlsConfig, TlsMode
from tests.conftest import fresh_database

pytestmark = pytest.mark.versions

PLUGIN = {"proto_version": "1", "publication_names": "pub"}


@pytest.fixture
def slot(database: Any) -> str:
    """A table, a publication and a slot of one test's own."""
    database.execute("create table t (id int primary key, v text); create publication pub for table t")
    name = f"slot_{database.name}"
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
    return name


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls_servers(authority: trustme.CA) -> Iterator[Callable[[int], PostgresServer]]:
    """A server of a version, started when asked for, that refuses TCP without TLS."""
    certificate = authority.issue_cert("localhost")
    tls = ServerTls(certificate.cert_chain_pems[0].bytes().decode(), certificate.private_key_pem.bytes().decode())
    hba = ("local all,replication all trust", "hostssl all,replication all 127.0.0.1/32 scram-sha-256")
    with ExitStack() as stack:
        yield cache(lambda version: stack.enter_context(PostgresServer.start(version=version, tls=tls, hba=hba)))


@pytest.fixture
def tls_server(tls_servers: Callable[[int], PostgresServer], pg_version: int) -> PostgresServer:
    return tls_servers(pg_version)


def with_tls(
    server: PostgresServer, mode: TlsMode, roots: str | None = None, host: str = "127.0.0.1"
) -> ConnectSettings:
    return server.settings(host=host, tls=TlsConfig(mode=mode, trusted_root_certs=roots))


def uses_tls(connection: WireConnection) -> bool:
    return connection.query("select ssl from pg_stat_ssl where pid = pg_backend_pid()") == [{"ssl": "t"}]


def confirmed(database: Any, slot: str) -> EndLsn:
    text = database.value("select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", [slot])
    return EndLsn.parse(text)


def read_until(stream: Any, wanted: bytes, seconds: float = 10) -> bytes:
    received, deadline = b"", time.monotonic() + seconds
    while wanted not in received:
        assert time.monotonic() < deadline, "the change did not come"
        if (chunk := stream.read(0.5)) is not None:
            received += chunk.data.tobytes()
    return received


@pytest.mark.parametrize("tcp", [True, False], ids=["scram over tcp", "unix socket"])
def test_a_session_opens_with_everything_pinned(pg_server: PostgresServer, tcp: bool) -> None:
    with WireConnection.connect(pg_server.settings(tcp=tcp)) as connection:
        assert connection.server_version == pg_server.version
        shown = {
            name: connection.query(f"show {name}")[0][name]
            for name in ("TimeZone", "bytea_output", "statement_timeout", "idle_session_timeout", "application_name")
        }
        assert connection.backend_pid == int(connection.query("select pg_backend_pid() as pid")[0]["pid"] or 0)
    assert shown == {
        "TimeZone": "UTC",
        "bytea_output": "hex",
        "statement_timeout": "0",
        "idle_session_timeout": "0",
        "application_name": "headwater",
    }
    assert connection.closed


def test_options_set_the_session(pg: ConnectSettings) -> None:
    with WireConnection.connect(pg, options={"work_mem": "7MB"}) as connection:
        assert connection.query("show work_mem") == [{"work_mem": "7MB"}]


def test_replication_commands_are_queries(pg: ConnectSettings) -> None:
    with WireConnection.connect(pg, replication=True) as connection:
        (row,) = connection.query("IDENTIFY_SYSTEM")
        assert row["dbname"] == pg.database
        assert EndLsn.parse(row["xlogpos"] or "") > EndLsn(0)


def test_an_error_leaves_the_session_usable(pg: ConnectSettings) -> None:
    with WireConnection.connect(pg) as connection:
        with pytest.raises(ServerError) as caught:
            connection.query("select 1/0")
        assert caught.value.sqlstate == "22012"
        with pytest.raises(ServerError):
            connection.copy_out("copy nowhere to stdout")
        assert connection.query("select 1 as one") == [{"one": "1"}]


def test_a_wrong_password_is_named_as_such(pg: ConnectSettings) -> None:
    with pytest.raises(AuthenticationError, match="password of role") as caught:
        WireConnection.connect(replace(pg, password=Secret("not this one")))
    assert "not this one" not in str(caught.value)
    assert "ALTER ROLE" in caught.value.hint


def test_a_missing_password_is_named_as_such(pg: ConnectSettings) -> None:
    with pytest.raises(AuthenticationError) as caught:
        WireConnection.connect(replace(pg, password=None))
    assert "none is set" in caught.value.detail


def test_a_missing_database_is_no_matter_of_time(pg: ConnectSettings) -> None:
    with pytest.raises(ConnectError, match="does not exist") as caught:
        WireConnection.connect(replace(pg, database="nowhere"))
    assert caught.value.retry is Retry.NEVER


def test_a_host_name_that_does_not_exist_is_a_connect_error(pg: ConnectSettings) -> None:
    with pytest.raises(ConnectError, match="could not be found"):
        WireConnection.connect(replace(pg, host="no-such-host.invalid"))


def test_the_error_for_a_role_without_replication_says_what_it_lacks(database: Any, pg_server: PostgresServer) -> None:
    role = f"plain_{database.name}"
    database.execute(f"create role {role} login")
    try:
        with pytest.raises(PrivilegeError, match="may not use replication") as caught:
            WireConnection.connect(pg_server.settings(database.name, tcp=False, username=role), replication=True)
        assert f'ALTER ROLE "{role}" REPLICATION' in caught.value.hint
    finally:
        database.execute(f"drop role {role}")


def test_md5_and_cleartext_and_no_entry(authority: trustme.CA) -> None:
    with PostgresServer.start() as server:
        with server.connect() as connection:
            connection.execute("set password_encryption = 'md5'; create role old login password 'x y'")
        old = server.settings(username="old", password=Secret("x y"))
        for method in ("md5", "password"):
            server.set_hba([f"host all old 127.0.0.1/32 {method}"])
            WireConnection.connect(old).close()
        server.set_hba(["host all somebody 127.0.0.1/32 md5"])
        with pytest.raises(AuthenticationError, match=r"pg_hba\.conf") as caught:
            WireConnection.connect(old)
        assert "pg_reload_conf" in caught.value.hint


def test_wal_level_replica_is_a_setting_to_change() -> None:
    with PostgresServer.start(settings={"wal_level": "replica"}) as server:
        with (
            WireConnection.connect(server.settings(), replication=True) as connection,
            pytest.raises(SourceSettingsError) as caught,
        ):
            connection.query("CREATE_REPLICATION_SLOT s LOGICAL pgoutput (SNAPSHOT 'nothing')")
        assert "ALTER SYSTEM SET wal_level = logical" in caught.value.hint


@pytest.mark.promise("Each TLS mode, verify-ca and verify-full told apart")
def test_prefer_falls_back_where_pg_hba_admits_only_plain_text(authority: trustme.CA) -> None:
    certificate = authority.issue_cert("localhost")
    tls = ServerTls(certificate.cert_chain_pems[0].bytes().decode(), certificate.private_key_pem.bytes().decode())
    hba = ("local all,replication all trust", "hostnossl all all 127.0.0.1/32 scram-sha-256")
    with (
        PostgresServer.start(tls=tls, hba=hba) as server,
        WireConnection.connect(with_tls(server, TlsMode.PREFER)) as connection,
    ):
        assert not uses_tls(connection)


@pytest.mark.parametrize("way", ["tcp", "unix", "tls"])
def test_copy_out_brings_every_row(pg_server: PostgresServer, tls_server: PostgresServer, way: str) -> None:
    server = tls_server if way == "tls" else pg_server
    with WireConnection.connect(server.settings(tcp=way != "unix")) as connection:
        chunks = list(
            connection.copy_out(
                "copy (select i, repeat('x', i % 100) from generate_series(1, 100000) i) to stdout", chunk_bytes=1 << 20
            )
        )
        assert connection.query("select 1 as one") == [{"one": "1"}]
    lines = []
    for chunk in chunks:
        data, position = chunk.data.tobytes(), 0
        while position < len(data):
            assert data[position : position + 1] == b"d"
            end = position + 1 + int.from_bytes(data[position + 1 : position + 5], "big")
            lines.append(data[position + 5 : end])
            position = end
        assert position == len(data)
    assert len(chunks) > 3
    assert lines == [f"{i}\t{'x' * (i % 100)}\n".encode() for i in range(1, 100_001)]


@pytest.mark.promise("one row of 64 MiB")
def test_a_row_of_64_mib_arrives_whole(pg: ConnectSettings) -> None:
    with WireConnection.connect(pg) as connection:
        chunks = list(connection.copy_out(f"copy (select repeat('y', {64 << 20})) to stdout", chunk_bytes=1 << 20))
    assert sum(len(chunk.data) for chunk in chunks) == (64 << 20) + 6


def test_an_error_in_mid_copy_is_raised_after_what_came(pg: ConnectSettings) -> None:
    received: list[Chunk] = []
    with WireConnection.connect(pg) as connection:
        statement = "copy (select 1 / (50000 - i) from generate_series(1, 100000) i) to stdout"
        with pytest.raises(ServerError, match="division by zero"):
            received.extend(connection.copy_out(statement, chunk_bytes=1 << 16))
        assert received
        assert connection.query("select 1 as one") == [{"one": "1"}]


@pytest.mark.promise("Several hosts, and a failover between them")
@pytest.mark.parametrize("way", ["tcp", "tls", "several hosts"])
def test_cancel_ends_a_statement_at_the_server_that_runs_it(
    pg_server: PostgresServer, tls_server: PostgresServer, way: str
) -> None:
    server = tls_server if way == "tls" else pg_server
    settings = server.settings()
    if way == "several hosts":
        settings = replace(settings, host=f"no-such-host.invalid,127.0.0.1:{server.port}", port=1)
    with WireConnection.connect(settings) as connection:
        caught: list[ServerError] = []

        def run() -> None:
            try:
                connection.query("select pg_sleep(60)")
            except ServerError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        with server.connect() as watcher:
            pid = connection.backend_pid
            sleeps = "select from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
            wait_until(lambda: watcher.execute(sleeps, [pid]).rowcount == 1)
        connection.cancel()
        thread.join(60)
        assert caught[0].sqlstate == "57014"
        assert connection.query("select 1 as one") == [{"one": "1"}]


@pytest.mark.parametrize("way", ["tcp", "unix", "tls"])
def test_a_terminated_session_is_a_lost_connection(
    pg_server: PostgresServer, tls_server: PostgresServer, way: str
) -> None:
    server = tls_server if way == "tls" else pg_server
    with WireConnection.connect(server.settings(tcp=way != "unix")) as connection:
        with server.connect() as other:
            other.execute("select pg_terminate_backend(%s, 10000)", [connection.backend_pid])
        # Whether our send fails first or not, the server's last word is what is told.
        with pytest.raises(ConnectionLost, match="ended the session") as caught:
            connection.query("select 1")
        assert caught.value.retry is Retry.TIMED
        assert connection.closed


def test_a_stream_whose_walsender_is_terminated_says_who_did_it(tls_server: PostgresServer) -> None:
    with (
        fresh_database(tls_server) as database,
        WireConnection.connect(database.settings, replication=True) as wire,
    ):
        database.execute("create publication pub for all tables")
        database.execute("select pg_create_logical_replication_slot('ended', 'pgoutput')")
        stream = wire.start_replication("ended", EndLsn(0), PLUGIN)
        database.execute("select pg_terminate_backend(%s, 10000)", [wire.backend_pid])
        with pytest.raises(ConnectionLost, match="ended the session") as caught:
            read_until(stream, b"what never comes")
        assert "57P01" in caught.value.detail


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
def test_a_slot_that_is_missing_or_taken(database: Any, slot: str) -> None:
    settings = database.settings
    with WireConnection.connect(settings, replication=True) as first:
        with pytest.raises(SlotError, match='"nowhere" does not exist'):
            first.start_replication("nowhere", EndLsn(0), PLUGIN)
        stream = first.start_replication(slot, EndLsn(0), PLUGIN)
        with WireConnection.connect(settings, replication=True) as second:
            with pytest.raises(SlotError, match="in use") as caught:
                second.start_replication(slot, EndLsn(0), PLUGIN)
            assert caught.value.retry is Retry.TIMED
            with pytest.raises(SlotError, match="exists already"):
                second.query(f"CREATE_REPLICATION_SLOT {slot} LOGICAL pgoutput (SNAPSHOT 'nothing')")
        stream.stop()
        assert not first.closed
        assert first.query("select 1 as one") == [{"one": "1"}]


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_changes_arrive_and_confirm_moves_the_slot(
    database: Any, slot: str, pg_server: PostgresServer, way: str
) -> None:
    with WireConnection.connect(pg_server.settings(database.name, tcp=way == "tcp"), replication=True) as connection:
        before = confirmed(database, slot)
        stream = connection.start_replication(slot, EndLsn(0), PLUGIN, status_interval_seconds=60)
        database.execute("insert into t values (1, 'a change to find')")
        read_until(stream, b"a change to find")
        flushed = EndLsn.parse(database.value("select pg_current_wal_flush_lsn()::text"))
        stream.request_reply()

        def received() -> bool:
            stream.read(0.05)
            return stream.last_received >= flushed

        wait_until(received)
        # Received and not confirmed: the slot stands still.
        assert confirmed(database, slot) == before
        stopping = threading.Event()

        def read() -> None:
            while not stopping.is_set():
                stream.read(30)

        reader = threading.Thread(target=read)
        reader.start()
        stream.confirm(flushed)
        wait_until(lambda: confirmed(database, slot) >= flushed)
        stopping.set()
        stream.wake()
        reader.join(60)
        assert not reader.is_alive()
        stream.stop()


def test_a_stream_under_tls_brings_everything(tls_server: PostgresServer) -> None:
    with fresh_database(tls_server) as database:
        database.execute("create table t (id int primary key, v text); create publication pub for table t")
        database.execute("select pg_create_logical_replication_slot('tls_slot', 'pgoutput')")
        database.execute("insert into t select i, md5(i::text) from generate_series(1, 50000) i")
        with WireConnection.connect(database.settings, replication=True) as wire:
            assert uses_tls(wire)
            stream = wire.start_replication("tls_slot", EndLsn(0), PLUGIN)
            received = b""
            while received.count(b"I") < 50_000 or b"C\0" not in received[-60:]:
                chunk = stream.read(10)
                assert chunk is not None
                received += chunk.data.tobytes()
            stream.stop()


@pytest.mark.invariant(8)
@pytest.mark.parametrize("reading", [True, False], ids=["in a long read", "by tick alone"])
def test_the_server_is_answered_while_nothing_is_read(reading: bool) -> None:
    with PostgresServer.start(settings={"wal_sender_timeout": "1s"}) as server, server.connect() as connection:
        connection.execute("create table t (id int primary key); create publication pub for table t")
        connection.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
        # Enough changes to fill every buffer on the way, so that the server's send stalls.
        connection.execute("insert into t select generate_series(1, 300000)")
        with WireConnection.connect(server.settings(), replication=True) as wire:
            stream = wire.start_replication("s", EndLsn(0), PLUGIN, status_interval_seconds=1 / 3)
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline:
                if reading:
                    stream.read(2.5)
                else:
                    stream.tick()
                    threading.Event().wait(0.02)
            alive = connection.execute("select from pg_stat_replication where pid = %s", [wire.backend_pid])
            assert alive.rowcount == 1


def test_a_single_change_after_a_quiet_time_is_not_held_back(database: Any, slot: str) -> None:
    waits = []
    with WireConnection.connect(database.settings, replication=True) as connection, database.connect() as writer:
        stream = connection.start_replication(slot, EndLsn(0), PLUGIN)
        for number in range(10):
            while stream.read(0.05) is not None:
                pass
            writer.execute("insert into t values (%s, %s)", [number, f"change number {number}."])
            began = time.monotonic()
            read_until(stream, f"change number {number}.".encode())
            waits.append(time.monotonic() - began)
    # Far less than any timer of ours; the best of ten, because the machine may be busy.
    assert min(waits) < 0.02


def test_a_stopped_server_ends_the_stream_and_refuses_in_time(tmp_path: Path) -> None:
    with PostgresServer.start() as server:
        with server.connect() as connection:
            connection.execute("create table t (id int primary key); create publication pub for table t")
            connection.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
        with WireConnection.connect(server.settings(), replication=True) as wire:
            stream = wire.start_replication("s", EndLsn(0), PLUGIN)
            server.stop("immediate")
            with pytest.raises(ConnectionLost) as caught:
                read_until(stream, b"what never comes")
            assert caught.value.retry is Retry.TIMED
        with pytest.raises(ConnectError, match="no server at"):
            WireConnection.connect(server.settings())
