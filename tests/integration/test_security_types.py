"""Types, expressions and names that the owner of a source table makes: when rows are read, nothing of them does harm."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from psycopg import sql

from headwater.errors import HeadwaterError
from headwater.schema.table import TableName
from headwater.source.catalog import load_table_schemas
from headwater.source.copy_read import copy_batches
from headwater.source.exported_snapshot import ExportedSnapshot, exported_snapshot
from headwater.source.leaves import check_unique
from headwater.source.publication import PublishedTable, published_tables
from headwater.source.rows import read_rows
from headwater.source.session import connect
from headwater.wire.settings import ConnectSettings
from tests.conftest import Database

RAN = "code of the owner ran as"

# In the server's log: a function that runs in a read-only transaction leaves no other trace.
SPY = """
create schema s authorization {owner};
set role {owner};
create function s.spy() returns bool language plpgsql as $$begin raise log '{ran} %', current_user; return true; end$$;
create function s.checked(int) returns bool language plpgsql as $$begin return s.spy(); end$$;
"""
KEYS = {
    "an enum with a cast from text": (
        """create type s.k as enum ('a');
        create function s.made(text) returns s.k language plpgsql as $$begin perform s.spy(); return 'a'; end$$;
        create cast (text as s.k) with function s.made(text)""",
        "a",
    ),
    "a composite type with a cast from text": (
        """create type s.k as (a int, b text);
        create function s.made(text) returns s.k language plpgsql as $$begin perform s.spy(); return row(1, 'x')::s.k; end$$;
        create cast (text as s.k) with function s.made(text)""",
        "(1,x)",
    ),
    "a composite type with an implicit cast to text": (
        """create type s.k as (a int);
        create function s.told(s.k) returns text language plpgsql as $$begin perform s.spy(); return 'x'; end$$;
        create cast (s.k as text) with function s.told(s.k) as implicit""",
        "(1)",
    ),
    "a composite type with a domain in it": (
        "create domain s.d as int check (s.checked(value)); create type s.k as (a s.d)",
        "(1)",
    ),
    "a range of a domain": (
        "create domain s.d as int check (s.checked(value)); create type s.k as range (subtype = s.d)",
        "[1,5)",
    ),
    "a domain over a composite type with a domain in it": (
        """create domain s.d as int check (s.checked(value)); create type s.c as (a s.d);
        create domain s.k as s.c check (s.spy())""",
        "(1)",
    ),
}


@pytest.fixture
def roles(database: Database) -> Iterator[tuple[str, str]]:
    owner, reader = f"owner_{database.name}", f"reader_{database.name}"
    database.execute(
        f'create role {owner}; create role {reader} login; grant create on database "{database.name}" to {owner}'
    )
    try:
        yield owner, reader
    finally:
        for role in (owner, reader):
            database.execute(f"drop owned by {role} cascade; drop role {role}")


def prepared(database: Database, roles: tuple[str, str], statements: str) -> ConnectSettings:
    """The settings of a role that may read what the owner has made."""
    owner, reader = roles
    database.execute(SPY.format(owner=owner, ran=RAN) + statements)
    database.execute(
        f"grant usage on schema s to {reader}; grant select on all tables in schema s to {reader};"
        f" grant execute on all functions in schema s to {reader}; reset role; create publication p for table s.t"
    )
    return database.server.settings(database.name, tcp=False, username=reader)


def has_run(database: Database, roles: tuple[str, str]) -> bool:
    return f"{RAN} {roles[1]}" in database.server.log


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("kind", KEYS)
def test_a_key_is_looked_up_without_code_that_its_type_brings(
    database: Database, roles: tuple[str, str], kind: str
) -> None:
    made, key = KEYS[kind]
    settings = prepared(
        database, roles, f"{made}; create table s.t (k s.k primary key, v int); insert into s.t values ('{key}', 7)"
    )
    with connect(settings) as session:
        (table,) = published_tables(session, "p")
        schema = load_table_schemas(session, [table.id], "p")[table.id]
        found = read_rows(session, schema, pa.table({"k": [key, key]})).rows
    assert found.to_pylist() == [{"k": key, "v": 7}]
    assert not has_run(database, roles)


EXPRESSIONS = {
    "an index": "create index on s.t ((s.writes(1)))",
    "the condition of an index": "create index on s.t (v) where s.writes(1) = 1",
    "statistics": "create statistics s.st on (s.writes(1)), (s.writes(2)) from s.t",
}


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("where", EXPRESSIONS)
def test_an_expression_that_the_server_works_out_while_it_plans_writes_nothing(
    database: Database, roles: tuple[str, str], where: str
) -> None:
    """The server runs such a function for whoever reads the table; see docs/security.md. It may not write for us."""
    settings = prepared(
        database,
        roles,
        f"""create table s.trace (who text); grant insert on s.trace to {roles[1]};
        create function s.write() returns int language plpgsql as
            $$begin if current_user = '{roles[1]}' then insert into s.trace values (current_user); end if; return 1; end$$;
        create function s.writes(int) returns int language plpgsql immutable as $$begin return s.write(); end$$;
        create table s.t (k int primary key, v int); insert into s.t values (1, 7); {EXPRESSIONS[where]}""",
    )
    with exported_snapshot(settings, "p") as snapshot, connect(settings) as session:
        planned = snapshot.tables["s.t"]
        (table,) = published_tables(session, "p")
        with pytest.raises(HeadwaterError, match="read-only transaction"):
            list(copy_batches(settings, snapshot.snapshot_name, planned.plan, planned.schema))
        for read in (
            lambda: read_rows(session, planned.schema, pa.table({"k": pa.array([1], pa.int32())})),
            lambda: check_unique(settings, snapshot.snapshot_name, table, ("k",), 100),
        ):
            with pytest.raises(HeadwaterError) as raised:
                read()
            assert "read-only transaction" in raised.value.detail
    assert database.value("select count(*) from s.trace") == 0


NAMES = {
    "quotes": "a'b\"c''",
    "backslashes": "a\\b\\",
    "a backslash before a quote": "x\\'; select s.spy(); --",
    "escapes": "E'\\x27",
    "a place of psycopg's": "c%sd%(x)s%%",
    "a place of Python's": "{0}{x}{",
    "dollars": "$1 $$ $a$",
    "a variable": "a${x}",
    "a comment": "a -- b /* c",
    "dots": "a.b..c",
    "newlines": "a\nb\r\nc",
    "control characters": "a\x01\x07\x1b[31m\x7f",
}


def copied(snapshot: ExportedSnapshot, table: str) -> list[dict[str, object]]:
    planned = snapshot.tables[table]
    batches = copy_batches(snapshot.settings, snapshot.snapshot_name, planned.plan, planned.schema)
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("conforming", ["on", "off"])
@pytest.mark.parametrize("length", ["short", "long"])
def test_every_name_means_itself_in_every_statement_that_reads_rows(
    database: Database, roles: tuple[str, str], conforming: str, length: str
) -> None:
    """Under the old meaning of a backslash too, which a database may have as its default."""
    names = [name if length == "short" else (name * 63).encode()[:63].decode() for name in NAMES.values()]
    settings = prepared(database, roles, "create table s.t (id int)")
    database.execute("drop publication p; create publication p for all tables with (publish_via_partition_root = true)")
    for number, name in enumerate(names):
        schema, table, leaf, key, value = (
            sql.Identifier(*parts)
            for parts in ((name,), (name, name), (name, f"1{name[:60]}"), (name,), (f"2{name[:60]}",))
        )
        database.execute(
            sql.SQL(
                "create schema {schema}; create table {table} ({key} int primary key, {value} inet) partition by range ({key});"
                " create table {leaf} partition of {table} for values from (0) to (10);"
                " insert into {table} values ({number}, '10.0.0.1'); grant usage on schema {schema} to {reader};"
                " grant select on all tables in schema {schema} to {reader}"
            ).format(
                schema=schema,
                table=table,
                leaf=leaf,
                key=key,
                value=value,
                number=number % 10,
                reader=sql.Identifier(roles[1]),
            )
        )
    database.execute(f'alter database "{database.name}" set standard_conforming_strings = {conforming}')

    def check(table: PublishedTable, snapshot: ExportedSnapshot, number: int) -> None:
        name = table.name.name
        expected = [{name: number % 10, f"2{name[:60]}": "10.0.0.1"}]
        schema = snapshot.tables[named[table.name]].schema
        assert copied(snapshot, named[table.name]) == expected
        keys = pa.table({name: pa.array([number % 10], pa.int32())})
        with connect(settings) as session:
            assert read_rows(session, schema, keys).rows.to_pylist() == expected
        check_unique(settings, snapshot.snapshot_name, table, (name,), 100)

    with exported_snapshot(settings, "p") as snapshot, connect(settings) as session:
        named = {planned.plan.name: key for key, planned in snapshot.tables.items()}
        tables = {table.name: table for table in published_tables(session, "p")}
        for number, name in enumerate(names):
            check(tables[TableName(name, name)], snapshot, number)
    assert not has_run(database, roles)


def test_tables_whose_dots_make_one_name_of_two_are_both_read(database: Database) -> None:
    database.execute(
        'create schema a; create schema "a.b"; create table a."b.c" (id int); create table "a.b".c (id int);'
        ' insert into a."b.c" values (1); insert into "a.b".c values (2); create publication p for all tables'
    )
    with exported_snapshot(database.settings, "p") as snapshot:
        assert {key: copied(snapshot, key) for key in snapshot.tables} == {
            '"a"."b.c"': [{"id": 1}],
            '"a.b"."c"': [{"id": 2}],
        }
