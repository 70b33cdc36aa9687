"""Replication slots on a real server: seen, judged, dropped, and who is in the way of making one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from headwater.contracts.stores import Lineage
from headwater.errors import Retry, SlotError
from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.source.server import flush_lsn, server_facts
from headwater.source.session import Connection, connect
from headwater.source.slot_check import SlotVerdict, blockers, check_apply_slot
from headwater.source.slot_errors import (
    LineageLost,
    OtherServer,
    SlotBeingSynced,
    SlotInUse,
    SlotInvalidated,
    SlotMissing,
    SlotNotOurs,
    StandbyBehind,
    TimelineLeft,
)
from headwater.source.slots import SlotFacts, apply_slot_name, drop_slot, inspect_slot, sync_slot_name, sync_slots
from headwater.source.timeline import ServerHistory
from headwater.testing.postgres import PostgresServer

pytestmark = pytest.mark.versions


@pytest.fixture
def session(database: Any) -> Iterator[Connection]:
    with connect(database.settings) as connection:
        yield connection


@pytest.fixture
def slot(database: Any) -> str:
    name = f"headwater_apply_{database.value('select oid::bigint from pg_database where datname = current_database()')}"
    create(database, name)
    return name


def create(database: Any, name: str, plugin: str = "pgoutput") -> None:
    database.execute("select pg_create_logical_replication_slot(%s, %s)", [name, plugin])


@contextmanager
def reading(database: Any, slot: str, application_name: str) -> Iterator[psycopg.Connection[Any]]:
    """Somebody who reads from the slot."""
    database.execute("drop publication if exists p; create publication p")
    options = "proto_version '1', publication_names 'p'"
    # A session that streams can't be committed, which `with` would do.
    with closing(database.connect(replication="database", application_name=application_name)) as connection:
        connection.pgconn.exec_(f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0 ({options})'.encode())
        yield connection


@pytest.mark.promise("names that the server does not cut, and one for each worker")
def test_slot_names_are_short_enough_and_carry_the_pipeline() -> None:
    assert apply_slot_name(7) == "headwater_apply_7"
    assert sync_slot_name(7, TableId(16384), "0123456789abcdef", 3) == "headwater_sync_7_16384_01234567_3"
    assert sync_slot_name(7, None, "0123456789abcdef", 4) == "headwater_sync_7_group_01234567_4"
    assert len(sync_slot_name(2**63 - 1, TableId(2**32 - 1), "f" * 32, 99_999_999)) <= 63


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
def test_a_slot_is_seen_as_the_server_shows_it(database: Any, session: Connection, slot: str) -> None:
    facts = inspect_slot(session, slot)
    assert (facts.exists, facts.plugin, facts.slot_type, facts.database) == (True, "pgoutput", "logical", database.name)
    assert (facts.active_pid, facts.wal_status, facts.invalidation_reason) == (None, "reserved", None)
    flush = flush_lsn(session)
    lag, retained = facts.lag_bytes(flush), facts.retained_bytes(flush)
    assert lag is not None
    assert retained is not None
    assert 0 <= lag <= retained
    assert not inspect_slot(session, "absent").exists


def test_leftover_sync_slots_of_one_pipeline_are_listed(database: Any, session: Connection) -> None:
    for name in ("headwater_sync_41_5", "headwater_sync_41_6", "headwater_sync_411_7", "headwater_apply_41"):
        create(database, name)
    assert [facts.name for facts in sync_slots(session, 41)] == ["headwater_sync_41_5", "headwater_sync_41_6"]


def test_dropping_a_slot_may_be_repeated(session: Connection, slot: str) -> None:
    assert drop_slot(session, slot, wait_seconds=1)
    assert not drop_slot(session, slot, wait_seconds=1)


def test_dropping_a_slot_ends_a_reader_of_ours(database: Any, session: Connection, slot: str) -> None:
    with reading(database, slot, "headwater_apply_1"):
        assert inspect_slot(session, slot).active_pid is not None
        assert drop_slot(session, slot, wait_seconds=20)
    assert not inspect_slot(session, slot).exists


def test_dropping_a_slot_leaves_a_stranger_alone(database: Any, session: Connection, slot: str) -> None:
    with reading(database, slot, "somebody_else") as reader:
        pid = inspect_slot(session, slot).active_pid
        start = time.monotonic()
        with pytest.raises(SlotInUse, match="in use") as error:
            drop_slot(session, slot, wait_seconds=0.3)
        assert time.monotonic() - start >= 0.3
        assert str(pid) in error.value.detail
        assert reader.info.backend_pid == pid


def test_a_fresh_start_creates_and_a_good_slot_is_resumed(session: Connection, slot: str) -> None:
    server, flush = server_facts(session), flush_lsn(session)
    history = ServerHistory(server.system_identifier, 1, flush)
    assert check_apply_slot(inspect_slot(session, "absent"), None, server, flush, history) is SlotVerdict.CREATE
    facts = inspect_slot(session, slot)
    for progress in (None, EndLsn(1), flush):
        for recorded in (None, history.lineage):
            assert check_apply_slot(facts, progress, server, flush, history, recorded) is SlotVerdict.RESUME


@pytest.mark.promise(
    "missing, invalidated, in use, another cluster, a new timeline, progress ahead: told apart, each with its hint"
)
def test_invariant_10_a_lost_slot_is_never_papered_over(session: Connection, slot: str) -> None:
    server, flush, facts = server_facts(session), flush_lsn(session), inspect_slot(session, slot)
    history = ServerHistory(server.system_identifier, 3, flush, {1: EndLsn(50), 2: EndLsn(100)})
    ours = history.lineage
    made_before = replace(facts, confirmed_flush=EndLsn(90))
    lost: list[tuple[type[SlotError], SlotFacts, EndLsn | None, Lineage]] = [
        (SlotMissing, inspect_slot(session, "absent"), EndLsn(5), ours),
        (SlotMissing, inspect_slot(session, "absent"), EndLsn(5), replace(ours, timeline=2)),
        (OtherServer, facts, EndLsn(flush.value + 1), ours),
        (OtherServer, facts, None, replace(ours, system_identifier="1")),
        (SlotInvalidated, replace(facts, wal_status="lost"), EndLsn(5), ours),
        (SlotInvalidated, replace(facts, invalidation_reason="idle_timeout"), None, ours),
        (TimelineLeft, replace(made_before, synced=True), EndLsn(101), replace(ours, timeline=2)),
        (TimelineLeft, replace(made_before, synced=True), EndLsn(51), replace(ours, timeline=1)),
        (TimelineLeft, replace(made_before, synced=True), EndLsn(5), replace(ours, timeline=4)),
        (TimelineLeft, facts, EndLsn(90), replace(ours, timeline=2)),
    ]
    for kind, found, progress, recorded in lost:
        with pytest.raises(kind) as error:
            check_apply_slot(found, progress, server, flush, history, recorded)
        assert isinstance(error.value, LineageLost)
        assert error.value.detail
        assert "headwater resync" in error.value.hint


@pytest.mark.invariant(10)
def test_a_new_timeline_continues_with_a_synchronized_slot_and_progress_before_the_switch(
    session: Connection, slot: str
) -> None:
    server, flush, facts = server_facts(session), flush_lsn(session), inspect_slot(session, slot)
    history = ServerHistory(server.system_identifier, 2, flush, {1: EndLsn(100)})
    recorded = replace(history.lineage, timeline=1)
    came_along = [replace(facts, synced=True), replace(facts, confirmed_flush=EndLsn(100))]
    for found in came_along:
        assert check_apply_slot(found, EndLsn(100), server, flush, history, recorded) is SlotVerdict.RESUME
    # Where nothing is on record, all tables are copied again, and any slot will do.
    assert check_apply_slot(facts, None, server, flush, history, recorded) is SlotVerdict.RESUME


@pytest.mark.promise(
    "missing, invalidated, in use, another cluster, a new timeline, progress ahead: told apart, each with its hint"
)
@pytest.mark.invariant(10)
def test_what_only_a_standby_shows_passes_by_itself(session: Connection, slot: str) -> None:
    server, flush, facts = server_facts(session), flush_lsn(session), inspect_slot(session, slot)
    standby = replace(server, in_recovery=True)
    history = ServerHistory(server.system_identifier, 1, flush)
    with pytest.raises(StandbyBehind, match="not replayed") as behind:
        check_apply_slot(facts, EndLsn(flush.value + 1), standby, flush, history)
    with pytest.raises(SlotBeingSynced, match="copy of its primary's slot") as synced:
        check_apply_slot(replace(facts, synced=True), None, standby, flush, history)
    for error in (behind.value, synced.value):
        assert error.retry is Retry.TIMED
        assert not isinstance(error, LineageLost)
        assert error.hint


@pytest.mark.promise(
    "missing, invalidated, in use, another cluster, a new timeline, progress ahead: told apart, each with its hint"
)
def test_a_slot_that_is_not_ours_is_refused(database: Any, session: Connection, slot: str) -> None:
    server, flush = server_facts(session), flush_lsn(session)
    history = ServerHistory(server.system_identifier, 1, flush)
    create(database, f"{slot}_other", "test_decoding")
    with pytest.raises(SlotNotOurs, match="was not created by Headwater"):
        check_apply_slot(inspect_slot(session, f"{slot}_other"), None, server, flush, history)
    with pytest.raises(SlotNotOurs, match="another database"):
        check_apply_slot(inspect_slot(session, slot), None, replace(server, database="elsewhere"), flush, history)
    with reading(database, slot, "headwater"), pytest.raises(SlotInUse):
        check_apply_slot(inspect_slot(session, slot), None, server, flush, history)


@pytest.mark.promise("an invalidated slot, with each behaviour")
@pytest.mark.invariant(10)
def test_a_slot_whose_wal_was_removed_is_seen_as_lost() -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "min_wal_size": "32MB"}
    with PostgresServer.start(settings=settings) as server, connect(server.settings()) as session:
        session.execute("select pg_create_logical_replication_slot('headwater_apply_1', 'pgoutput')")
        session.execute("create table public.filler (t text)")
        for _ in range(4):
            session.execute("insert into public.filler values ('x')")
            session.execute("select pg_switch_wal()")
        session.execute("checkpoint")
        facts = inspect_slot(session, "headwater_apply_1")
        assert facts.invalidated
        facts_now, flush = server_facts(session), flush_lsn(session)
        history = ServerHistory(facts_now.system_identifier, 1, flush)
        with pytest.raises(SlotInvalidated) as error:
            check_apply_slot(facts, EndLsn(5), facts_now, flush, history)
        assert "wal_status=lost" in error.value.detail
        assert "max_slot_wal_keep_size is 1MB" in error.value.detail


def test_transactions_that_block_a_new_slot_are_named_without_their_statements(
    database: Any, session: Connection
) -> None:
    database.execute("create table t (id int)")
    writer = database.connect(application_name="nightly report")
    reader = database.connect()
    try:
        reader.execute("begin")
        reader.execute("select count(*) from t")
        writer.execute("begin")
        writer.execute("insert into t values (42)")
        with database.connect() as preparing:
            preparing.execute("begin")
            preparing.execute("insert into t values (43)")
            preparing.execute(f"prepare transaction 'gid {database.name}'")
        found = blockers(session)
        prepared = [blocker for blocker in found if blocker.gid == f"gid {database.name}"]
        writing = [blocker for blocker in found if blocker.pid == writer.info.backend_pid]
        assert len(prepared) == len(writing) == 1
        assert "nightly report" in str(writing[0])
        assert "insert" not in str(writing[0])
        assert writing[0].age_seconds is not None
        assert reader.info.backend_pid not in {blocker.pid for blocker in found}, "who only reads is not waited for"
    finally:
        writer.close()
        reader.close()
        database.execute(f"rollback prepared 'gid {database.name}'")
