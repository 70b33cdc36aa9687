"""The oracle itself: it must see every kind of difference, or the tests that stand on it prove nothing."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ColumnSchema, ReplicatedTableSchema, TableId, TableName, TableSchema
from headwater.schema.types import BUILT_IN
from headwater.testing.compare import compare_rows, wait_until

NUMERIC_10_2 = (10 << 16 | 2) + 4
COLUMNS = (
    ColumnSchema("id", BUILT_IN[20], primary_key=True),
    ColumnSchema("t", BUILT_IN[25]),
    ColumnSchema("f", BUILT_IN[701]),
    ColumnSchema("n", BUILT_IN[1700], typmod=NUMERIC_10_2),
    ColumnSchema("a", BUILT_IN[1009]),
)
KEYED = ReplicatedTableSchema(TableSchema(TableId(1), TableName("public", "t"), COLUMNS))
KEYLESS = ReplicatedTableSchema(TableSchema(TableId(1), TableName("public", "t"), COLUMNS[1:2]))
ROW = {"id": 1, "t": "x", "f": 1.0, "n": Decimal("1.50"), "a": ["p", None]}


def batch(schema: ReplicatedTableSchema, *rows: dict[str, Any]) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist(list(rows), arrow_schema(schema))]


def counts(
    schema: ReplicatedTableSchema, source: list[pa.RecordBatch], lake: list[pa.RecordBatch]
) -> tuple[int, int, int]:
    found = compare_rows(schema, source, lake)
    assert found.equal == (found.differing == found.missing == found.extra == 0)
    return found.differing, found.missing, found.extra


def test_the_same_rows_in_another_order_are_equal() -> None:
    other = ROW | {"id": 2, "t": None}
    assert counts(KEYED, batch(KEYED, ROW, other), batch(KEYED, other, ROW)) == (0, 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"t": ""},
        {"t": None},
        {"f": None},
        {"f": 1.0000000000000002},
        {"n": Decimal("1.51")},
        {"a": ["p"]},
        {"a": ["p", ""]},
        {"a": []},
        {"a": None},
    ],
)
def test_every_changed_value_is_seen(change: dict[str, Any]) -> None:
    found = compare_rows(KEYED, batch(KEYED, ROW), batch(KEYED, ROW | change))
    assert (found.differing, found.missing, found.extra) == (1, 0, 0)
    (name,) = change
    assert f"(1): {name} is {ROW[name]!r} in the source and {change[name]!r} in the lake" in str(found)
    with pytest.raises(AssertionError, match="1 differing"):
        found.assert_equal()


def test_minus_zero_is_not_zero_and_nan_is_nan() -> None:
    assert counts(KEYED, batch(KEYED, ROW | {"f": 0.0}), batch(KEYED, ROW | {"f": -0.0})) == (1, 0, 0)
    nan = batch(KEYED, ROW | {"f": float("nan")})
    assert counts(KEYED, nan, nan) == (0, 0, 0)


def test_missing_extra_and_doubled_rows_are_distinguished() -> None:
    other = ROW | {"id": 2}
    assert counts(KEYED, batch(KEYED, ROW, other), batch(KEYED, ROW)) == (0, 1, 0)
    assert counts(KEYED, batch(KEYED, ROW), batch(KEYED, ROW, other)) == (0, 0, 1)
    assert counts(KEYED, batch(KEYED, ROW), batch(KEYED, ROW, ROW)) == (0, 0, 1)
    assert counts(KEYED, batch(KEYED, ROW, other), batch(KEYED, ROW, ROW)) == (0, 1, 1)


def test_rows_without_a_key_are_counted() -> None:
    x, y, null = {"t": "x"}, {"t": ""}, {"t": None}
    assert counts(KEYLESS, batch(KEYLESS, x, x, null), batch(KEYLESS, x, null, x)) == (0, 0, 0)
    assert counts(KEYLESS, batch(KEYLESS, x, x, null), batch(KEYLESS, x, y)) == (0, 2, 1)


def test_tables_too_large_for_memory_are_compared_in_parts() -> None:
    rows = [ROW | {"id": number} for number in range(500)]
    source = [one for row in rows for one in batch(KEYED, row)]
    changed = [row | {"t": "changed"} if row["id"] == 77 else row for row in reversed(rows) if row["id"] != 400]
    lake = [one for row in changed for one in batch(KEYED, row)]
    found = compare_rows(KEYED, source, lake, bucket_rows=50)
    assert (found.source_rows, found.lake_rows) == (500, 499)
    assert (found.differing, found.missing, found.extra) == (1, 1, 0)
    assert compare_rows(KEYED, source, source[::-1], bucket_rows=50).equal
    small = batch(KEYED, *rows[:10])
    assert compare_rows(KEYED, source, small, bucket_rows=50).missing == 490


def test_an_empty_table_equals_an_empty_table() -> None:
    assert counts(KEYED, [], batch(KEYED)) == (0, 0, 0)


def test_waiting_names_what_it_waited_for_and_stops_when_it_has_become_pointless() -> None:
    with pytest.raises(TimeoutError, match="the lake"):
        wait_until(lambda: False, 0.02, what="the lake", interval=0.005)

    def failed() -> None:
        raise RuntimeError("the pipeline failed")

    with pytest.raises(RuntimeError, match="the pipeline failed"):
        wait_until(lambda: False, 10, still_good=failed)
