"""Rows read again by key, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.errors import SchemaError, ServerError
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.source import rows
from headwater.source.catalog import load_table_schemas
from headwater.source.rows import read_rows
from headwater.source.session import LOCK_NOT_AVAILABLE, Connection, connect


@pytest.fixture
def session(database: Any) -> Iterator[Connection]:
    with connect(database.settings) as connection:
        yield connection


def load(database: Any, session: Connection, table: str) -> ReplicatedTableSchema:
    table_id = TableId(database.value(f"select '{table}'::regclass::oid::bigint"))
    return load_table_schemas(session, [table_id], "p")[table_id]


def test_present_rows_come_with_the_types_of_copy_and_stream(database: Any, session: Connection) -> None:
    database.execute("""
        create table t (id int8, "K" text, n numeric(10,2), big numeric, f float8, b bytea, d date, ts timestamptz,
                        j jsonb, u uuid, net inet, tags text[], hidden text, primary key (id, "K"));
        insert into t values (1, 'a''b', 1.50, 1e30, 0.1, '\\x00ff', '2020-02-29', '2020-01-01 00:00:00.000001+00',
                              '{"a": 1}', '00000000-0000-0000-0000-000000000001', '10.0.0.1', '{x,NULL}', 'no'),
                             (2, 'z', null, null, null, null, null, null, null, null, null, null, null);
        create publication p for table t (id, "K", n, big, f, b, d, ts, j, u, net, tags);
    """)
    schema = load(database, session, "t")
    keys = pa.table({"id": pa.array([1, 2, 1, 3], pa.int64()), "K": ["a'b", "z", "a'b", "gone"]})
    rows = read_rows(session, schema, keys).rows
    assert rows.schema == arrow_schema(schema)
    found = sorted(rows.to_pylist(), key=lambda row: row["id"])
    assert found == [
        {
            "id": 1,
            "K": "a'b",
            "n": Decimal("1.50"),
            "big": "1000000000000000000000000000000",
            "f": 0.1,
            "b": b"\x00\xff",
            "d": date(2020, 2, 29),
            "ts": datetime(2020, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
            "j": '{"a": 1}',
            "u": "00000000-0000-0000-0000-000000000001",
            "net": "10.0.0.1",
            "tags": ["x", None],
        },
        {**dict.fromkeys(schema.table_schema.column(name).name for name in rows.column_names), "id": 2, "K": "z"},
    ]


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ("bool", True),
        ("int2", -5),
        ("numeric(12,4)", Decimal("-1.2500")),
        ("numeric", "123456789012345678901234567890.5"),
        ("float4", 0.10000000149011612),
        ("bytea", b"\x00\\x"),
        ("date", date(1999, 12, 31)),
        ("timestamp", datetime(2020, 1, 1, 1, 2, 3, 456789)),
        ("timestamptz", datetime(2020, 1, 1, 1, 2, 3, 456789, tzinfo=UTC)),
        ("uuid", "00000000-0000-0000-0000-00000000000a"),
        ("char(5)", "ab   "),
        ('"char"', "x"),
        ("mood", "sad"),
        ("price", Decimal("9.99")),
        ("citext", "MixedCase"),
        ("inet", "10.0.0.0/8"),
        ("interval", "1 day 02:00:00"),
    ],
)
def test_keys_of_every_kind_find_their_row(database: Any, session: Connection, type: str, value: Any) -> None:
    database.execute("create extension citext; create type mood as enum ('sad'); create domain price as numeric(6,2)")
    database.execute(f"create table t (k {type} primary key, x int); create publication p for table t")
    database.execute(f"insert into t values (%s::text::{type}, 7)", [_text(value)])
    schema = load(database, session, "t")
    keys = pa.table([pa.array([value], arrow_schema(schema).field("k").type)], names=["k"])
    assert read_rows(session, schema, keys).rows.to_pylist() == [{"k": value, "x": 7}]


def _text(value: Any) -> str:
    return "\\x" + value.hex() if isinstance(value, bytes) else str(value)


def test_an_empty_question_has_an_empty_answer(database: Any, session: Connection) -> None:
    database.execute("create table t (id int primary key, x text); create publication p for table t")
    schema = load(database, session, "t")
    keys = pa.table({"id": pa.array([], pa.int32())})
    assert read_rows(session, schema, keys).rows.schema == arrow_schema(schema)
    assert read_rows(session, schema, pa.table({"id": pa.array([5], pa.int32())})).rows.num_rows == 0


def test_a_schema_that_is_no_longer_true_is_an_error(database: Any, session: Connection) -> None:
    database.execute("create table t (id int primary key, x text); create table keyless (id int)")
    database.execute("create publication p for all tables")
    schema, keyless = load(database, session, "t"), load(database, session, "keyless")
    database.execute("alter table t rename x to y")
    keys = pa.table({"id": pa.array([5], pa.int32())})
    with pytest.raises(SchemaError, match="can no longer be read"):
        read_rows(session, schema, keys)
    with pytest.raises(SchemaError, match="by key"):
        read_rows(session, keyless, keys)


KEY_1 = pa.table({"id": pa.array([1], pa.int32())})


def test_rows_of_tables_that_inherit_are_not_the_tables_own(database: Any, session: Connection) -> None:
    database.execute(
        "create table t(id int primary key, b text); create table child(primary key (id)) inherits (t);"
        " insert into t values (1, 'own'); insert into child values (1, 'another'); create publication p for table only t"
    )
    assert read_rows(session, load(database, session, "t"), KEY_1).rows["b"].to_pylist() == ["own"]


def test_a_table_is_read_by_its_oid_whatever_has_its_name_now(database: Any, session: Connection) -> None:
    database.execute(
        "create table t(id int primary key, b text); insert into t values (1, 'own'); create publication p for table t;"
        " create table other(id int primary key, b text); insert into other values (1, 'another')"
    )
    schema = load(database, session, "t")
    database.execute("alter table t rename to before; alter table other rename to t")
    assert read_rows(session, schema, KEY_1).rows["b"].to_pylist() == ["own"]
    database.execute("drop table before")
    with pytest.raises(SchemaError, match="no longer be read") as raised:
        read_rows(session, schema, KEY_1)
    assert "dropped" in raised.value.detail


def test_a_table_that_another_session_has_for_itself_is_not_waited_for_long(
    database: Any, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_LOCK_SECONDS", 0.1)
    database.execute("create table t(id int primary key); create publication p for table t")
    schema = load(database, session, "t")
    with database.connect() as other, other.transaction():
        other.execute("lock table t")
        with pytest.raises(ServerError) as raised:
            read_rows(session, schema, KEY_1)
    assert raised.value.sqlstate == LOCK_NOT_AVAILABLE
    assert read_rows(session, schema, KEY_1).rows.num_rows == 0


def test_a_check_of_a_domain_does_not_run_when_keys_are_read(database: Any, session: Connection) -> None:
    """What the source's owners wrote would run with our rights."""
    database.execute(
        "create function refuse(v int) returns bool language plpgsql as $$ begin raise 'it ran'; end $$;"
        " create domain d as int; create table t(id d primary key, b text); insert into t values (1, 'x');"
        " create publication p for table t; alter domain d add check (refuse(value)) not valid"
    )
    assert read_rows(session, load(database, session, "t"), KEY_1).rows["b"].to_pylist() == ["x"]
