"""The owner of a source table decides what is in it. Whatever the owner does to names, a copy runs none of the owner's code as
our role, and takes no row of another relation for the table's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from headwater.errors import HeadwaterError, StartAgain
from headwater.source.catalog import load_table_schemas
from headwater.source.copy_plan import SmallTable
from headwater.source.copy_read import copy_batches
from headwater.source.copy_small import read_small_tables
from headwater.source.exported_snapshot import ExportedSnapshot, exported_snapshot
from headwater.source.leaves import check_unique
from headwater.source.publication import published_tables
from headwater.source.rows import read_rows
from headwater.source.session import connect
from headwater.wire import connection as wire_connection
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings
from tests.conftest import Database

RAN = "function of the owner ran as"

# In the server's log: a function that runs in a read-only transaction leaves no other trace.
TABLES = """
create schema s authorization {owner};
set role {owner};
create table s.t (id int primary key, v int, at inet);
insert into s.t values (1, 1, '10.0.0.1');
create table s.m (id int, v int, primary key (id)) partition by range (id);
create table s.m1 partition of s.m for values from (0) to (10);
insert into s.m values (1, 1);
create function s.mine(int) returns int language plpgsql as
    $$begin raise log '{ran} % in {owner}', current_user; return $1; end$$;
grant usage on schema s to {reader};
grant select on all tables in schema s to {reader};
reset role;
create publication p for table s.t, s.m with (publish_via_partition_root = true);
"""
VIEWS = """
create schema s;
create view s.t as select 0 as ctid, {oid}::oid as tableoid, s_old.mine(666) as id, 666 as v, '10.6.6.6'::inet as at;
create view s.m as select s_old.mine(666) as id, 666 as v;
create view s.m1 as select 0 as ctid, {leaf}::oid as tableoid, s_old.mine(666) as id, 666 as v;
"""
FORGED = """
create schema s;
create table s.t as select 666 as id, 666 as v, '10.6.6.6'::inet as at;
create table s.m as select 666 as id, 666 as v;
create table s.m1 as select 666 as id, 666 as v;
"""
GRANTS = "grant usage on schema s to {reader}; grant select on all tables in schema s to {reader}"


@dataclass
class Hostile:
    """The owner of the schema `s`, who may put another one in its place and take it back."""

    database: Database
    session: psycopg.Connection[tuple[Any, ...]]
    settings: ConnectSettings
    owner: str
    reader: str

    def run(self, statements: str) -> None:
        self.session.execute(statements.format(owner=self.owner, reader=self.reader, ran=RAN))

    def put_in_place(self, what: str) -> None:
        oids = {
            "oid": self.database.value("select 's.t'::regclass::oid"),
            "leaf": self.database.value("select 's.m1'::regclass::oid"),
        }
        self.session.execute("alter schema s rename to s_old")
        self.run(what.replace("{oid}", str(oids["oid"])).replace("{leaf}", str(oids["leaf"])) + GRANTS)

    def take_back(self) -> None:
        self.session.execute("alter schema s rename to s_forged; alter schema s_old rename to s")

    def has_run(self) -> bool:
        return f"{RAN} {self.reader}" in self.database.server.log


@pytest.fixture
def hostile(database: Database) -> Iterator[Hostile]:
    owner, reader = f"owner_{database.name}", f"reader_{database.name}"
    database.execute(
        f"create role {owner}; create role {reader} login; grant create on database {database.name} to {owner}"
    )
    database.execute(TABLES.format(owner=owner, reader=reader, ran=RAN))
    settings = database.server.settings(database.name, tcp=False, username=reader)
    try:
        with database.connect() as session:
            session.execute(f"set role {owner}")
            yield Hostile(database, session, settings, owner, reader)
    finally:
        for role in (owner, reader):
            database.execute(f"drop owned by {role} cascade; drop role {role}")


def rows(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def copied(snapshot: ExportedSnapshot, table: str) -> list[dict[str, Any]]:
    planned = snapshot.tables[table]
    return rows(copy_batches(snapshot.settings, snapshot.snapshot_name, planned.plan, planned.schema))


def copied_as_small(snapshot: ExportedSnapshot, table: str) -> list[dict[str, Any]]:
    planned = snapshot.tables[table]
    small = SmallTable(planned.plan.table_id, snapshot.origin(table), planned.plan.ranges)
    (read,) = read_small_tables([small], 1 << 20)
    if read.error is not None:
        raise read.error
    return rows(iter(pa.ipc.open_stream(read.rows)))


@contextmanager
def without_the_servers_own_help(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a server of before August 2024, which expands every view."""
    with monkeypatch.context() as patch:
        patch.setattr(wire_connection, "RESTRICTED", "SELECT")
        yield


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("read", [copied, copied_as_small])
@pytest.mark.parametrize("table", ["s.t", "s.m"])
@pytest.mark.parametrize("what", [VIEWS, FORGED], ids=["views", "tables"])
def test_a_schema_renamed_between_plan_and_copy_runs_nothing_and_forges_nothing(
    hostile: Hostile, table: str, what: str, read: Any
) -> None:
    with exported_snapshot(hostile.settings, "p") as snapshot:
        assert [row["id"] for row in read(snapshot, table)] == [1]
        hostile.put_in_place(what)
        with pytest.raises(StartAgain, match="is no longer the table that was planned"):
            read(snapshot, table)
        assert not hostile.has_run()
        hostile.take_back()
        assert [row["id"] for row in read(snapshot, table)] == [1]


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("table", ["s.t", "s.m"])
@pytest.mark.parametrize("what", [VIEWS, FORGED], ids=["views", "tables"])
@pytest.mark.parametrize("helped", [True, False], ids=["restricted", "not restricted"])
def test_a_schema_renamed_for_the_moment_of_the_copy_alone_forges_nothing(
    hostile: Hostile, table: str, what: str, helped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_out = WireConnection.copy_out

    def swapped(connection: WireConnection, sql: str, **arguments: Any) -> Iterator[Any]:
        hostile.put_in_place(what)
        try:
            return copy_out(connection, sql, **arguments)
        finally:
            hostile.take_back()

    with exported_snapshot(hostile.settings, "p") as snapshot:
        monkeypatch.setattr(WireConnection, "copy_out", swapped)
        if helped:
            with pytest.raises(HeadwaterError):
                copied(snapshot, table)
            assert not hostile.has_run()
            return
        with without_the_servers_own_help(monkeypatch), pytest.raises(HeadwaterError):
            copied(snapshot, table)


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("what", [VIEWS, FORGED], ids=["views", "tables"])
def test_rows_read_again_by_key_are_the_tables_own(
    hostile: Hostile, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = pa.table({"id": pa.array([1, 666], pa.int32())})
    with connect(hostile.settings) as session:
        tables = {str(table.name): table.id for table in published_tables(session, "p")}
        schemas = load_table_schemas(session, list(tables.values()), "p")
        for name in ("s.t", "s.m"):
            assert read_rows(session, schemas[tables[name]], keys).rows.column("id").to_pylist() == [1]
        hostile.put_in_place(what)
        # By its oid, so under its other name; the role may enter that schema.
        for name in ("s.t", "s.m"):
            assert read_rows(session, schemas[tables[name]], keys).rows.column("id").to_pylist() == [1]
        assert not hostile.has_run()
        hostile.take_back()
        copy = psycopg.Cursor.copy

        def swapped(cursor: psycopg.Cursor[Any], *arguments: Any) -> Any:
            hostile.put_in_place(
                what.replace("create schema s;", "drop schema if exists s_forged cascade; create schema s;")
            )
            try:
                return copy(cursor, *arguments)
            finally:
                pass

        monkeypatch.setattr(psycopg.Cursor, "copy", swapped)
        for name in ("s.t", "s.m"):
            with pytest.raises(HeadwaterError):
                read_rows(session, schemas[tables[name]], keys)
            hostile.take_back()
        assert not hostile.has_run()


@pytest.mark.versions(14, 18)
def test_keys_are_counted_in_the_table_that_was_planned(hostile: Hostile) -> None:
    with exported_snapshot(hostile.settings, "p") as snapshot, connect(hostile.settings) as session:
        (table,) = [table for table in published_tables(session, "p") if table.name.name == "m"]
        check_unique(hostile.settings, snapshot.snapshot_name, table, ("id",), 100)
        hostile.put_in_place(VIEWS)
        with pytest.raises(HeadwaterError):
            check_unique(hostile.settings, snapshot.snapshot_name, table, ("id",), 100)
        assert not hostile.has_run()


@pytest.mark.versions(14, 15, 16, 17, 18)
def test_every_session_of_ours_expands_no_view_of_the_owners(hostile: Hostile) -> None:
    hostile.run("create view s.seen as select s.mine(1); grant select on s.seen to {reader}")
    with connect(hostile.settings) as session, pytest.raises(psycopg.Error, match="access to non-system view"):
        session.execute("select * from s.seen")
    for replication in (False, True):
        with (
            (
                WireConnection.connect(hostile.settings, replication=replication)
                if not replication
                else WireConnection.connect(hostile.database.settings, replication=True)
            ) as wire,
            pytest.raises(HeadwaterError, match="non-system view"),
        ):
            wire.query("select * from s.seen")
    assert not hostile.has_run()
