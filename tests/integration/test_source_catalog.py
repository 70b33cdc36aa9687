"""Tables as the catalog describes them, on a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from headwater.errors import SourceError
from headwater.schema.table import ReplicaIdentity, ReplicatedTableSchema, SnapshotId, TableId
from headwater.schema.types import BUILT_IN, Kind
from headwater.source.catalog import load_table_schemas
from headwater.source.session import Connection, connect
from headwater.testing.binaries import DEFAULT_VERSION

pytestmark = pytest.mark.versions


@pytest.fixture
def session(database: Any) -> Iterator[Connection]:
    with connect(database.settings) as connection:
        yield connection


def load(database: Any, session: Connection, table: str) -> ReplicatedTableSchema:
    table_id = TableId(database.value(f"select '{table}'::regclass::oid::bigint"))
    return load_table_schemas(session, [table_id], "p", SnapshotId(7))[table_id]


def test_types_of_the_sources_own_making_resolve_to_the_kinds_we_decode(database: Any, session: Connection) -> None:
    database.execute("""
        create extension citext;
        create domain price as numeric(10,2); create domain tax as price;
        create type mood as enum ('sad', 'ok'); create type pair as (a int, b int);
        create domain tags as text[];
        create table t (
            id int8 primary key, gone int, plain numeric, exact numeric(12,3) not null,
            domain_of_domain tax, prices tax[],
            feeling mood, feelings mood[], ci citext, cis citext[], tagged tags,
            net inet, nets inet[], both_ pair, vec int2vector, texts text[], name varchar(20));
        alter table t drop column gone;
        create publication p for table t;
    """)
    schema = load(database, session, "t")
    kinds = {column.name: column.type.kind for column in schema.columns}
    assert kinds == {
        "id": Kind.INT8,
        "plain": Kind.NUMERIC,
        "exact": Kind.NUMERIC,
        "domain_of_domain": Kind.NUMERIC,
        "prices": Kind.ARRAY,
        "feeling": Kind.TEXT,
        "feelings": Kind.ARRAY,
        "ci": Kind.TEXT,
        "cis": Kind.ARRAY,
        "tagged": Kind.ARRAY,
        "net": Kind.OTHER,
        "nets": Kind.OTHER,
        "both_": Kind.OTHER,
        "vec": Kind.OTHER,
        "texts": Kind.ARRAY,
        "name": Kind.TEXT,
    }
    columns = {column.name: column for column in schema.columns}
    assert columns["plain"].numeric_precision is None
    assert columns["exact"].numeric_precision == (12, 3)
    assert columns["domain_of_domain"].numeric_precision == (10, 2)
    assert columns["prices"].numeric_precision == (10, 2)
    assert columns["domain_of_domain"].typmod == -1, "as RELATION sends it"
    assert columns["texts"].type is BUILT_IN[1009]
    elements = {name: c.type.element.kind for name, c in columns.items() if c.type.element is not None}
    assert elements == {
        "prices": Kind.NUMERIC,
        "feelings": Kind.TEXT,
        "cis": Kind.TEXT,
        "tagged": Kind.TEXT,
        "texts": Kind.TEXT,
    }
    assert [columns[name].nullable for name in ("id", "exact", "plain")] == [False, False, True]
    assert [columns[name].attnum for name in ("id", "plain")] == [1, 3], "a dropped column leaves its number unused"
    assert schema.table_schema.snapshot_id == 7


@pytest.mark.promise("names with quotes, spaces, capitals, unicode and 63 bytes")
def test_names_keep_quotes_capitals_and_unicode(database: Any, session: Connection) -> None:
    namespace, table, column = 'Ein "Raum"', 'tä\'ble "x" %s', 'ключ % "k"'
    quoted = [name.replace('"', '""') for name in (namespace, table, column)]
    database.execute(f'create schema "{quoted[0]}"')
    database.execute('create table "{}"."{}" ("{}" int primary key)'.format(*quoted))
    database.execute("create publication p for all tables")
    table_id = TableId(database.value("select oid::bigint from pg_class where relname = %s", [table]))
    (schema,) = load_table_schemas(session, [table_id], "p").values()
    assert (schema.name.namespace, schema.name.name, schema.columns[0].name) == (namespace, table, column)
    assert schema.key == (column,)


@pytest.mark.promise("default, full, using index, nothing")
@pytest.mark.invariant(13)
def test_the_key_is_the_replica_identitys(database: Any, session: Connection) -> None:
    database.execute("""
        create table default_ (b int, a int, c int, primary key (a, b));
        create table full_ (a int primary key, b int); alter table full_ replica identity full;
        create table full_keyless (a int, b int); alter table full_keyless replica identity full;
        create table nothing_ (a int primary key); alter table nothing_ replica identity nothing;
        create table index_ (a int primary key, b int not null, c int not null, d int);
        create unique index by_cb on index_ (c, b) include (d); alter table index_ replica identity using index by_cb;
        create table index_gone (a int primary key, b int not null);
        create unique index gone on index_gone (b); alter table index_gone replica identity using index gone;
        drop index gone;
        create table keyless (a int);
        create table deferred (a int primary key deferrable initially deferred);
        create publication p for all tables;
    """)
    expected = {
        "default_": (ReplicaIdentity.DEFAULT, ("b", "a"), False),
        "full_": (ReplicaIdentity.FULL, ("a",), False),
        "full_keyless": (ReplicaIdentity.FULL, (), False),
        "nothing_": (ReplicaIdentity.NOTHING, (), True),
        "index_": (ReplicaIdentity.INDEX, ("b", "c"), False),
        "index_gone": (ReplicaIdentity.NOTHING, (), True),
        "keyless": (ReplicaIdentity.DEFAULT, (), True),
        "deferred": (ReplicaIdentity.DEFAULT, (), True),
    }
    for table, (identity, key, insert_only) in expected.items():
        schema = load(database, session, table)
        found = (schema.table_schema.replica_identity, schema.key, schema.insert_only)
        assert found == (identity, key, insert_only), table


def test_the_mask_follows_the_column_list_and_leaves_out_generated_columns(database: Any, session: Connection) -> None:
    database.execute("""
        create table listed (id int primary key, secret text, shown text);
        create table computed (id int primary key, twice int generated always as (id * 2) stored, c text);
        create publication p for table listed (shown, id), computed;
    """)
    assert load(database, session, "listed").replication_mask == (True, False, True)
    computed = load(database, session, "computed")
    assert computed.replication_mask == (True, False, True)
    assert [column.name for column in computed.columns] == ["id", "c"]


def test_generated_columns_are_replicated_where_the_publication_says_so(database: Any, session: Connection) -> None:
    if session.info.server_version < 180000:
        pytest.skip("needs Postgres 18")
    database.execute("""
        create table computed (id int primary key, stored int generated always as (id * 2) stored,
                               virtual int generated always as (id * 3) virtual);
        create publication p for table computed with (publish_generated_columns = stored);
    """)
    assert load(database, session, "computed").replication_mask == (True, True, False)


def test_a_dropped_table_is_missing_and_one_outside_the_publication_has_all_columns(
    database: Any, session: Connection
) -> None:
    database.execute(
        "create table a (id int primary key, x int); create table b (id int); create publication p for table b"
    )
    schema = load(database, session, "a")
    assert schema.replication_mask == (True, True)
    assert load_table_schemas(session, [TableId(1), schema.id], "p").keys() == {schema.id}
    assert load_table_schemas(session, [], "p") == {}
    with pytest.raises(SourceError, match="does not exist"):
        load_table_schemas(session, [schema.id], "absent")


@pytest.mark.promise("1,000 tables")
@pytest.mark.versions(DEFAULT_VERSION)
def test_a_thousand_tables_are_read_quickly(database: Any, session: Connection) -> None:
    database.execute("""
        do $$ begin for i in 1..1000 loop
            execute format('create table t%s (id int primary key, a text, b numeric(10,2), c timestamptz)', i);
        end loop; end $$;
        create publication p for all tables
    """)
    ids = [TableId(oid) for (oid,) in database.execute("select oid::bigint from pg_class where relname ~ '^t\\d+$'")]
    start = time.monotonic()
    schemas = load_table_schemas(session, ids, "p")
    assert len(schemas) == 1000
    assert time.monotonic() - start < 5
    assert {schema.key for schema in schemas.values()} == {("id",)}


@pytest.mark.promise("1,600 columns")
def test_a_table_of_1600_columns_and_one_of_none(database: Any, session: Connection) -> None:
    columns = ", ".join(f"c{i} bool" for i in range(1600))
    database.execute(f"create table wide ({columns}); create table bare (); create publication p for all tables")
    assert len(load(database, session, "wide").columns) == 1600
    assert load(database, session, "bare").columns == ()
