"""Ordinary sessions on a real server: what is pinned, and what refusals become."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from headwater.errors import AuthenticationError, ConnectError, ConnectionLost, PrivilegeError, ServerError, TlsError
from headwater.secret import Secret
from headwater.source.server import _identify_system, flush_lsn, server_facts
from headwater.source.session import connect, fetch_all, fetch_one
from headwater.wire.connection import WireConnection
from headwater.wire.startup import PINNED
from headwater.wire.tls_config import TlsConfig, TlsMode

pytestmark = pytest.mark.versions


@pytest.mark.invariant(1)
def test_every_timeout_is_zero_and_output_is_pinned_whatever_the_role_says(database: Any) -> None:
    for setting in (
        "statement_timeout = '7s'",
        "idle_in_transaction_session_timeout = '7s'",
        "idle_session_timeout = '7s'",
        "DateStyle = 'German'",
        "TimeZone = 'Asia/Tokyo'",
        "bytea_output = 'escape'",
        "search_path = 'evil'",
    ):
        database.execute(f'alter database "{database.name}" set {setting}')
    with connect(database.settings, application_name="headwater_x") as session:
        shown = {name: session.execute(f"show {name}").fetchone() for name in PINNED}
        assert {name: row[0] for name, row in shown.items() if row is not None} == PINNED
        every = session.execute("select name, setting from pg_settings").fetchall()
        newer = ["transaction_timeout"] if session.info.server_version >= 170000 else []
        for name in ("idle_session_timeout", *newer):
            assert session.execute(f"show {name}").fetchone() == ("0",)
        assert session.execute("show application_name").fetchone() == ("headwater_x",)
        assert session.execute("show client_encoding").fetchone() == ("UTF8",)
        assert session.autocommit
    # The same for our own client, for copies and for streams: what a value looks like must not depend on who reads it.
    for replication in (False, True):
        with WireConnection.connect(
            replace(database.settings, application_name="headwater_x"), replication=replication
        ) as ours:
            rows = ours.query("select name, setting from pg_settings")
            assert {(str(row["name"]), row["setting"]) for row in rows} == set(every)
    with connect(database.settings, autocommit=False) as session:
        assert not session.autocommit


def test_refused_connections_are_distinguished_and_show_no_password(database: Any) -> None:
    settings = replace(database.settings, password=Secret("s3cret-and-wrong"))
    with pytest.raises(AuthenticationError) as refused:
        connect(settings)
    assert "s3cret" not in str(refused.value) + repr(refused.value.__cause__) + repr(refused.value.__context__)
    assert refused.value.hint
    with pytest.raises(ConnectError, match="absent"):
        connect(database.server.settings("absent"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectError, match="cannot connect"):
            connect(replace(database.settings, port=unused.getsockname()[1]))
    with pytest.raises(TlsError):
        connect(replace(database.settings, tls=TlsConfig(mode=TlsMode.REQUIRE)))


def test_errors_of_an_open_session_are_ours(database: Any) -> None:
    database.execute("drop role if exists headwater_poor; create role headwater_poor login; create table t (id int)")
    poor = database.server.settings(database.name, tcp=False, username="headwater_poor")
    with connect(poor) as session, pytest.raises(PrivilegeError, match="reading t"):
        fetch_all(session, "select * from public.t", doing="reading t")
    with connect(database.settings) as session:
        with pytest.raises(ServerError) as failed:
            fetch_one(session, "select 1/0", doing="dividing")
        assert failed.value.sqlstate == "22012"
        database.execute("select pg_terminate_backend(%s, 5000)", [session.info.backend_pid])
        with pytest.raises(ConnectionLost):
            fetch_one(session, "select 1", doing="asking")
    database.execute("drop role headwater_poor")


def test_a_policy_that_would_hide_rows_fails_instead(database: Any) -> None:
    database.execute("drop role if exists headwater_rls; create role headwater_rls login")
    database.execute(
        "create table t (id int); alter table t enable row level security; grant select on t to headwater_rls"
    )
    settings = database.server.settings(database.name, tcp=False, username="headwater_rls")
    with connect(settings) as session, pytest.raises(PrivilegeError):
        fetch_all(session, "select * from public.t", doing="reading t")
    database.execute("drop table t; drop role headwater_rls")


def test_the_server_tells_its_facts(database: Any) -> None:
    with connect(database.settings) as session:
        facts = server_facts(session)
        assert facts.version_number == database.server.version
        assert (facts.wal_level, facts.in_recovery, facts.database) == ("logical", False, database.name)
        assert (facts.max_replication_slots, facts.wal_sender_timeout_ms, facts.timeline) == (40, 60000, 1)
        assert facts.system_identifier == _identify_system(session), "with and without pg_control_system()"
        before = flush_lsn(session)
        database.execute("create table t (id int)")
        assert before < flush_lsn(session)


def test_the_system_identifier_is_found_where_the_function_is_closed(database: Any) -> None:
    database.execute("drop role if exists headwater_repl; create role headwater_repl login replication")
    database.execute("revoke execute on function pg_control_system() from public")
    settings = database.server.settings(database.name, tcp=False, username="headwater_repl")
    with connect(settings) as session, psycopg.connect(**database.settings.conninfo()) as super_session:
        expected = super_session.execute("select system_identifier::text from pg_control_system()").fetchone()
        assert (server_facts(session).system_identifier,) == expected
    database.execute("drop role headwater_repl")
