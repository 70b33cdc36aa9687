"""`default_transaction_read_only` for the role or the database: a default, which sessions of ours that write set aside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from headwater.config import PgConnectionConfig
from headwater.errors import ConnectError
from headwater.source.session import connect
from headwater.source.slots import apply_slot_name
from headwater.store.postgres import PostgresStore
from headwater.testing.compare import wait_until
from headwater.wire.connection import WireConnection
from headwater.wire.hosts import ROLE_QUERY
from headwater.wire.settings import ConnectSettings, TargetSessionAttrs
from tests.commands import headwater, write_settings
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import running


@pytest.fixture(params=["role", "database"])
def read_only(database: Database, request: pytest.FixtureRequest) -> Iterator[ConnectSettings]:
    """Settings of a role whose transactions are read-only unless they say otherwise."""
    role, settings = f"reader_{database.name}", database.settings
    assert settings.password is not None
    database.execute(f"create role {role} login replication superuser password '{settings.password.reveal()}'")
    where = f"role {role}" if request.param == "role" else f'database "{database.name}"'
    database.execute(f"alter {where} set default_transaction_read_only = on")
    # The test's own session is from before, and stays as it is.
    settings = replace(settings, username=role)
    with psycopg.connect(**settings.conninfo()) as session, pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        session.execute("create table refused()")
    yield settings
    database.execute(f"reassign owned by {role} to current_user; drop owned by {role}; drop role {role}")


@pytest.mark.versions(14, 18)
def test_a_whole_pipeline_with_its_state_in_the_source(database: Database, read_only: ConnectSettings) -> None:
    database.execute("create table orders(id int primary key, n int); create publication shop for table orders")
    database.execute("insert into orders select i, i from generate_series(1, 50) i")
    at = read_only
    connection = PgConnectionConfig(
        host=at.host, port=at.port, name=at.database, username=at.username, password=at.password
    )
    destination, emitted = MemoryTables(), "select count(*) from pg_stat_activity where query like '%%emit_message%%'"
    settings = {"pg_connection": connection, "heartbeat_interval_ms": 100}
    with running(database, destination, PostgresStore(read_only, 1), **settings) as run:
        run.wait_states("ready", 1)
        database.execute("update orders set n = 0 where id < 9; delete from orders where id = 20")
        database.execute("create table items(id int primary key); alter publication shop add table items")
        database.execute("insert into items values (1)")
        run.wait_states("ready", 2)
        run.wait_caught_up()
        # An idle source: only the heartbeat writes.
        before = database.value("select pg_current_wal_insert_lsn()")
        moved = "select confirmed_flush_lsn > %s::pg_lsn from pg_replication_slots where slot_name = %s"
        wait_until(lambda: database.value(moved, [before, apply_slot_name(1)]), 30, what="a heartbeat to arrive")
        assert database.value(emitted) >= 1
        run.stop()
    database.execute("insert into orders select i, i from generate_series(51, 60) i")
    with running(database, destination, PostgresStore(read_only, 1), **settings) as run:
        run.wait_states("ready", 2)
        run.wait_caught_up()
        run.assert_equal("orders", "items")
        assert destination.copies.count("orders") == destination.copies.count("items") == 1


def test_commands_that_record_or_remove(database: Database, read_only: ConnectSettings, tmp_path: Path) -> None:
    database.execute("create table orders(id int primary key); create publication shop for table orders")
    at = read_only
    connection = PgConnectionConfig(
        host=at.host, port=at.port, name=at.database, username=at.username, password=at.password
    )
    with running(database, store=PostgresStore(read_only, 1), pg_connection=connection) as run:
        run.wait_states("ready", 1)
        run.stop()
    file = write_settings(database, tmp_path, username=at.username)
    assert "copied again" in headwater("resync", file, "public.orders")
    headwater("remove", "--yes", file)
    assert database.value("select to_regnamespace('headwater')") is None
    assert database.value("select count(*) from pg_replication_slots where database = current_database()") == 0


def test_sessions_that_only_read_keep_the_default(read_only: ConnectSettings) -> None:
    with connect(read_only) as session, pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        session.execute("create table refused()")


def test_a_primary_with_that_default_is_a_primary_and_not_read_write_as_in_libpq(read_only: ConnectSettings) -> None:
    """libpq's read-write asks for the default too; what is taken of several servers without a wish is the primary."""
    several = replace(read_only, host=f"{read_only.host},{read_only.host}")
    for settings in (several, replace(several, target_session_attrs=TargetSessionAttrs.READ_ONLY)):
        with connect(settings, writes=True) as session:
            session.execute("create temporary table allowed()")
        with WireConnection.connect(settings) as wire:
            assert wire.query(ROLE_QUERY) == [{"in_recovery": "false", "read_only": "on"}]
    wanted = replace(several, target_session_attrs=TargetSessionAttrs.READ_WRITE)
    with pytest.raises(ConnectError, match="none of the servers"), connect(wanted, writes=True):
        pass
    with pytest.raises(ConnectError, match="none of the servers"), WireConnection.connect(wanted):
        pass
