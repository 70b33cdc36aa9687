"""Copy ranges as values: no row between two of them, none in two of them."""

from __future__ import annotations

import pickle
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.schema.table import ColumnSchema, TableId, TableName
from headwater.schema.types import BUILT_IN, Kind, PgType, other
from headwater.secret import Secret
from headwater.source.copy_origin import CopyOrigin
from headwater.source.copy_plan import (
    MIN_RANGE_BYTES,
    CopyPlan,
    CopyRange,
    Heap,
    copy_statement,
    range_bytes,
    select_list,
    split_heap,
)
from headwater.wire.settings import ConnectSettings

NAME = TableName("public", "orders")


def bounds(copy_range: CopyRange) -> tuple[int | None, int | None]:
    lower = re.search(r"ctid >= '\((\d+),0\)'", copy_range.sql)
    upper = re.search(r"ctid < '\((\d+),0\)'", copy_range.sql)
    return (int(lower[1]) if lower else None, int(upper[1]) if upper else None)


@given(
    st.integers(0, 5_000_000),
    st.integers(0, 1 << 40),
    st.integers(1 << 20, 1 << 30),
    st.integers(1, 64),
    st.integers(1, 500),
)
def test_every_block_is_in_exactly_one_range(blocks: int, toast: int, target: int, parallelism: int, most: int) -> None:
    heap = Heap(NAME, blocks, 8192, toast)
    ranges = split_heap(heap, '"id"', None, range_bytes(heap.bytes, target, most, parallelism))
    found = [bounds(r) for r in ranges]
    assert len(ranges) <= most
    assert found[0][0] is None
    assert found[-1][1] is None
    assert all(before[1] == after[0] is not None for before, after in pairwise(found))
    inner = [upper for _, upper in found if upper is not None]
    assert len(inner) == len(ranges) - 1
    assert inner == sorted(set(inner))
    assert all(0 < upper < blocks for upper in inner)


def test_an_empty_table_is_still_read_because_it_may_have_grown() -> None:
    (only,) = split_heap(Heap(NAME, 0, 8192), '"id"', None, MIN_RANGE_BYTES)
    assert only.sql == 'COPY (SELECT "id" FROM ONLY "public"."orders") TO STDOUT (FORMAT binary)'


def test_toast_counts_so_that_a_small_heap_with_large_values_is_divided() -> None:
    assert len(split_heap(Heap(NAME, 100, 8192, 1 << 30), '"id"', None, 64 << 20)) == 17


@pytest.mark.parametrize(("total", "ranges"), [(1, 1), (8 << 20, 1), (40 << 20, 4), (64 << 20, 4), (500 << 20, 8)])
def test_ranges_come_in_full_rounds_once_a_table_is_worth_it(total: int, ranges: int) -> None:
    assert -(-total // range_bytes(total, 64 << 20, 1000, 4)) == ranges


def test_a_row_filter_with_or_in_it_stays_within_its_range() -> None:
    sql = copy_statement(NAME, '"id"', "a OR b", 3, 7)
    assert sql.endswith("WHERE ctid >= '(3,0)'::tid AND ctid < '(7,0)'::tid AND (a OR b)) TO STDOUT (FORMAT binary)")


def test_names_are_quoted() -> None:
    sql = copy_statement(TableName('my "ns"', "Tischgröße"), '"id"', None, None, None)
    assert 'FROM ONLY "my ""ns"""."Tischgröße")' in sql


def test_types_without_a_decoder_are_read_by_their_output_function() -> None:
    inet = other(869, "inet")
    columns = [
        ColumnSchema("a", BUILT_IN[20]),
        ColumnSchema('b "x"', inet),
        ColumnSchema("c", PgType(1041, "inet[]", Kind.ARRAY, inet)),
    ]
    first, second, third = select_list(columns).split(", CASE")
    assert first == '"a"'
    quoted = '"b ""x"""'
    assert second == f" WHEN pg_catalog.num_nulls({quoted}) = 0 THEN pg_catalog.concat({quoted}) END"
    assert 'concat("c")' in third


def plan(*sizes: int) -> CopyPlan:
    ranges = tuple(CopyRange(TableName("p", str(i)), f"COPY {i}", size) for i, size in enumerate(sizes))
    return CopyPlan(TableId(1), NAME, "0", '"id"', ranges, target_range_bytes=10)


def test_small_leaves_share_a_task() -> None:
    assert [len(task) for task in plan(1, 2, 3, 4, 5, 10, 10).tasks()] == [4, 1, 1, 1]


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 8))
def test_tasks_hold_every_range_once_and_never_exceed_the_cap(sizes: list[int], most: int) -> None:
    whole = plan(*sizes)
    tasks = whole.tasks(most)
    assert len(tasks) <= most
    assert sorted(r.sql for task in tasks for r in task) == sorted(r.sql for r in whole.ranges)


def test_what_travels_to_an_executor_survives_pickling_and_hides_the_password() -> None:
    settings = ConnectSettings("db", 5432, "shop", "reader", Secret("open sesame"))
    origin = CopyOrigin(settings, "00000003-1", "1.5", (ColumnSchema("id", BUILT_IN[20]),))
    assert pickle.loads(pickle.dumps(origin)) == origin
    assert pickle.loads(pickle.dumps(plan(1, 2))) == plan(1, 2)
    assert "sesame" not in f"{origin!r} {origin}"
