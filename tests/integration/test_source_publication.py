"""What a publication publishes, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headwater.errors import SourceError
from headwater.source.publication import PublishedTable, publication_options, published_tables
from headwater.source.session import Connection, connect

pytestmark = pytest.mark.versions


@pytest.fixture
def session(database: Any) -> Iterator[Connection]:
    with connect(database.settings) as connection:
        yield connection


def by_name(tables: list[PublishedTable]) -> dict[str, PublishedTable]:
    return {str(table.name): table for table in tables}


@pytest.mark.promise("FOR ALL TABLES")
@pytest.mark.invariant(9)
def test_our_namespace_and_the_systems_are_never_published(database: Any, session: Connection) -> None:
    database.execute("""
        create schema headwater; create table headwater.table_states (id int primary key);
        create table orders (id int primary key); create unlogged table scratch (id int);
        create view v as select 1; create publication p for all tables;
    """)
    assert list(by_name(published_tables(session, "p"))) == ["public.orders"]


@pytest.mark.promise("TABLES IN SCHEMA")
def test_tables_in_schema_of_our_own_namespace_publishes_nothing(database: Any, session: Connection) -> None:
    database.execute("""
        create schema headwater; create table headwater.x (id int primary key);
        create schema shop; create table shop.orders (id int primary key); create table other (id int);
        create publication p for tables in schema shop, headwater;
    """)
    assert list(by_name(published_tables(session, "p"))) == ["shop.orders"]


@pytest.mark.promise(
    "partitioned roots, nested partitions and single leaves, with and without publish_via_partition_root"
)
def test_leaves_or_the_root_as_the_publication_says(database: Any, session: Connection) -> None:
    database.execute("""
        create table m (id int, at int, primary key (id, at)) partition by range (at);
        create table m1 partition of m for values from (0) to (10);
        create table m2 partition of m for values from (10) to (20) partition by range (id);
        create table m2a partition of m2 for values from (0) to (1000);
        insert into m select i, i % 20 from generate_series(1, 100) i; analyze m1; analyze m2a;
        create publication leaves for table m;
        create publication root for table m with (publish_via_partition_root = true);
        create publication everything for all tables with (publish_via_partition_root = true);
        create publication one_leaf for table m1;
    """)
    assert list(by_name(published_tables(session, "leaves"))) == ["public.m1", "public.m2a"]
    (root,) = published_tables(session, "root")
    assert (str(root.name), root.relkind, root.is_partitioned, root.estimated_rows) == ("public.m", "p", True, 100)
    assert root.relation_bytes >= 2 * 8192
    assert list(by_name(published_tables(session, "everything"))) == ["public.m"]
    assert list(by_name(published_tables(session, "one_leaf"))) == ["public.m1"]


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
def test_row_filters_and_column_lists_are_read(database: Any, session: Connection) -> None:
    database.execute("""
        create table a (id int primary key, "Big" text, c int); create table b (id int primary key);
        insert into b select generate_series(1, 1000); analyze b;
        create publication p for table a (id, "Big") where (id > 10 and "Big" <> 'x'), b;
    """)
    tables = by_name(published_tables(session, "p"))
    filtered, plain = tables["public.a"], tables["public.b"]
    assert filtered.columns == ("id", "Big")
    assert filtered.row_filter is not None
    assert '"Big" <> ' in filtered.row_filter
    assert filtered.estimated_rows is None, "never analysed"
    assert (plain.columns, plain.row_filter, plain.estimated_rows) == (None, None, 1000)
    assert plain.relation_bytes > 8192


def test_a_missing_publication_is_reported_with_those_that_exist(database: Any, session: Connection) -> None:
    with pytest.raises(SourceError) as none:
        published_tables(session, 'my "pub"')
    assert "no publication at all" in none.value.detail
    assert 'CREATE PUBLICATION "my ""pub"""' in none.value.hint
    database.execute("create publication shop")
    with pytest.raises(SourceError) as other:
        publication_options(session, "shops")
    assert '"shop"' in other.value.detail


def test_operations_that_are_not_published_are_known(database: Any, session: Connection) -> None:
    database.execute("create publication p with (publish = 'insert, update')")
    assert publication_options(session, "p").missing_operations == ("delete", "truncate")
