"""Rows read again by key, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.errors import SchemaError
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.source.catalog import load_table_schemas
from headwater.source.rows import read_rows
from headwater.source.session import Connection, connect


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
