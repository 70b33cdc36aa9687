"""Which tables a publication sends, read from the catalog alone: as the server's own function says, and without a lock."""

from __future__ import annotations

import pytest

from headwater.source.catalog_look import CatalogLooks, read_fingerprints
from headwater.source.publication import published_tables
from headwater.source.session import connect
from tests.conftest import Database

SHAPES = """
create schema depot; create schema yard;
create table plain(id int primary key, a int, b text);
create table depot.shelf(id int primary key); create unlogged table depot.scratch(id int);
create table m(id int, at int, primary key (id, at)) partition by range (at);
create table m1 partition of m for values from (0) to (10);
create table m2 partition of m for values from (10) to (20) partition by range (id);
create table yard.m2a partition of m2 for values from (0) to (10);
create table depot.empty_root(id int) partition by range (id);
create table parent(id int primary key); create table child() inherits (parent);
create view v as select 1 as one;
"""
PUBLICATIONS = ["for table plain, m", "for table only parent, m2", "for table m, m1", "for all tables"]
IN_SCHEMAS = ["for tables in schema depot", "for tables in schema yard, public", "for tables in schema yard, table m"]


@pytest.mark.versions(14, 15, 16, 17, 18)
@pytest.mark.parametrize("via_root", [True, False])
def test_members_are_those_of_the_servers_own_function(database: Database, pg_version: int, via_root: bool) -> None:
    database.execute(SHAPES)
    options = f"with (publish_via_partition_root = {via_root})"
    with connect(database.settings) as session:
        for number, named in enumerate(PUBLICATIONS + (IN_SCHEMAS if pg_version >= 15 else [])):
            database.execute(f"create publication p{number} {named} {options}")
            listed = {
                (schema, table)
                for schema, table in database.execute(
                    "select schemaname::text, tablename::text from pg_publication_tables where pubname = %s",
                    [f"p{number}"],
                )
            }
            if pg_version == 14 and via_root:
                # There the function lists a leaf beside its root, though its changes are sent as the root's.
                listed -= {("public", "m1")} if ("public", "m") in listed else set()
            found = {(table.name.namespace, table.name.name) for table in published_tables(session, f"p{number}")}
            assert found == listed, named
            looked = read_fingerprints(session, f"p{number}").values()
            assert {(table.namespace, table.name) for table in looked} == listed, named


@pytest.mark.versions(14, 18)
def test_a_look_does_not_wait_for_a_session_that_has_a_table_locked(database: Database) -> None:
    database.execute(SHAPES + "create publication p for all tables with (publish_via_partition_root = true)")
    with connect(database.settings) as session, database.connect() as other:
        looks = CatalogLooks("p")
        before = looks.look(session)
        session.execute("set lock_timeout = '1ms'")
        with other.transaction():
            other.execute("lock table plain, m, depot.shelf in access exclusive mode")
            other.execute("create table late(id int primary key)")
            assert looks.look(session).tables == before.tables
            assert len(published_tables(session, "p")) == len(before.tables)
        after = looks.look(session)
        assert len(after.tables) == len(before.tables) + 1
        assert all(after.tables[id] is table for id, table in before.tables.items())
        assert after.position > before.position
