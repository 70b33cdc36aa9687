"""The preflight on real servers: a ready one has nothing to say, an unready one hears everything at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headwater.errors import PreflightError
from headwater.source.preflight import Finding, Severity, raise_for_errors, run_preflight
from headwater.source.session import Connection, connect
from headwater.testing.compare import wait_until
from headwater.testing.postgres import PostgresServer
from headwater.testing.standby import standby_of


@pytest.fixture
def session(database: Any) -> Iterator[Connection]:
    with connect(database.settings) as connection:
        yield connection


@pytest.fixture
def role(database: Any) -> Iterator[str]:
    name = f"headwater_{database.name}"
    database.execute(f"create role {name} login")
    yield name
    database.execute(f"drop owned by {name}; drop role {name}")


def run(session: Connection, **changes: Any) -> list[Finding]:
    return run_preflight(session, "p", **{"pipeline_id": 1, **changes})


def messages(findings: list[Finding], severity: Severity) -> str:
    assert all(finding.message and finding.detail and finding.hint for finding in findings)
    return "\n".join(finding.message for finding in findings if finding.severity is severity)


def test_a_ready_source_has_nothing_to_say(database: Any, session: Connection) -> None:
    database.execute("create table t (id int primary key); create publication p for table t")
    findings = run(session)
    assert findings == []
    raise_for_errors(findings)


def test_a_missing_and_an_empty_publication_are_errors(database: Any, session: Connection) -> None:
    assert "does not exist" in messages(run(session), Severity.ERROR)
    database.execute("create publication p")
    assert "publishes no table" in messages(run(session), Severity.ERROR)


def test_all_missing_rights_are_reported_at_once(database: Any, role: str) -> None:
    database.execute(f"""
        create schema closed; create table closed.a (id int primary key);
        create table b (id int primary key, x text); create table c (id int primary key, x text);
        create table d (id int primary key); alter table d enable row level security;
        grant select (id, x) on c to {role}; grant select on d to {role};
        create table m (id int primary key) partition by range (id);
        create table m1 partition of m for values from (0) to (9); grant select on m to {role};
        create publication p for table closed.a, b, c, d, m with (publish_via_partition_root = true);
    """)
    with connect(database.server.settings(database.name, tcp=False, username=role)) as session:
        findings = run(session)
        found = {finding.message: finding.detail for finding in findings}
        assert found[f'role "{role}" may not replicate']
        assert "namespace headwater" in messages(findings, Severity.ERROR)
        assert "closed" in found[f'role "{role}" may not use 1 namespace']
        unreadable = found[f'role "{role}" may not read 2 tables']
        assert '"public"."b"' in unreadable
        assert '"public"."m"' in unreadable
        assert '"public"."d"' in found[f'row security hides rows of 1 table from role "{role}"']
        with pytest.raises(PreflightError, match="5 problems") as error:
            raise_for_errors(findings)
        assert all(message in error.value.detail for message in found)
        elsewhere = run(session, store_in_source=False)
        assert "namespace headwater" not in messages(elsewhere, Severity.ERROR)
        database.execute("create schema headwater")
        assert "may not write to the namespace headwater" in messages(run(session), Severity.ERROR)


def test_a_role_with_just_the_rights_it_needs_is_enough(database: Any, role: str) -> None:
    database.execute(f"""
        alter role {role} replication; create schema shop; grant usage on schema shop to {role};
        create table shop.t (id int primary key); grant select on shop.t to {role};
        grant create on database "{database.name}" to {role}; create publication p for table shop.t;
    """)
    with connect(database.server.settings(database.name, tcp=False, username=role)) as session:
        assert run(session) == []


def test_tables_the_source_itself_will_not_update_are_warned_of(database: Any, session: Connection) -> None:
    database.execute("""
        create table keyless (id int); create table nothing_ (id int primary key);
        alter table nothing_ replica identity nothing;
        create table partial (id int primary key, x text); create table whole (a int, b int);
        alter table whole replica identity full;
        create publication p for table keyless, nothing_, partial (x), whole (a);
    """)
    findings = run(session)
    warned = {finding.message: finding.detail for finding in findings}
    assert '"public"."keyless", "public"."nothing_"' in warned["2 tables without a usable replica identity"]
    partial = warned["the column lists of 2 tables leave out the replica identity"]
    assert '"public"."partial", "public"."whole"' in partial
    raise_for_errors(findings)
    database.execute("alter publication p set (publish = 'insert')")
    (finding,) = run(session)
    assert "update, delete, truncate" in finding.detail


def test_too_few_slots_are_reported_and_our_own_do_not_count() -> None:
    settings = {"max_replication_slots": "3", "max_wal_senders": "2", "wal_sender_timeout": "0"}
    with PostgresServer.start(settings=settings) as server, connect(server.settings()) as session:
        session.execute("create table public.t (id int primary key)")
        session.execute("create publication p for table public.t")
        for slot in ("headwater_apply_1", "headwater_sync_1_5", "somebody_else"):
            session.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
        findings = run(session, max_table_sync_workers=1)
        assert messages(findings, Severity.ERROR) == ""
        assert "never ends the walsender" in messages(findings, Severity.WARNING)
        findings = run(session, max_table_sync_workers=2)
        assert "too few free replication slots" in messages(findings, Severity.ERROR)
        assert "too few free wal senders" in messages(findings, Severity.ERROR)
        assert any("others use 1, this pipeline needs 3" in finding.detail for finding in findings)


def test_a_server_with_too_low_a_wal_level_is_reported() -> None:
    with PostgresServer.start(settings={"wal_level": "replica", "wal_sender_timeout": "1s"}) as server:
        with connect(server.settings()) as session:
            findings = run(session)
        assert "logical replication needs" in messages(findings, Severity.ERROR)
        assert "after a very short silence" in messages(findings, Severity.WARNING)
        assert findings[0].severity is Severity.ERROR


@pytest.mark.promise("failover slots where they are asked for")
def test_what_makes_a_failover_slot_useless_is_warned_of_where_it_can_be_seen() -> None:
    with PostgresServer.start() as server, connect(server.settings()) as session:
        session.execute("create table public.t (id int primary key)")
        session.execute("create publication p for table public.t")
        assert run(session) == []
        findings = run(session, failover_slot=True)
        assert messages(findings, Severity.ERROR) == ""
        assert "no standby can synchronize the slot" in messages(findings, Severity.WARNING)
        assert "the lake may get ahead of a standby" in messages(findings, Severity.WARNING)
        with standby_of(server, settings={"hot_standby_feedback": "off"}) as standby:
            session.execute("alter system set synchronized_standby_slots = 'standby, absent'")
            server.reload()
            with connect(server.settings()) as fresh:
                findings = run(fresh, failover_slot=True)
            assert "1 of 1 standbys cannot synchronize the slot" in messages(findings, Severity.WARNING)
            (unreachable,) = [finding for finding in findings if "unreachable standby" in finding.message]
            assert "names absent," in unreachable.detail
            session.execute("alter system set synchronized_standby_slots = 'standby'")
            server.reload()
            with standby.connect() as below:
                below.execute("alter system set hot_standby_feedback = on")
            standby.reload()
            with connect(server.settings()) as fresh:
                wait_until(lambda: run(fresh, failover_slot=True) == [], 30, what="the standby's feedback")
