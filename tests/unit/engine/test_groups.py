"""Which tables go together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.engine.table_sync.groups import GROUP_BYTES, GROUP_TABLES, SMALL_TABLE_BYTES, form_groups
from headwater.schema.table import TableId, TableName
from headwater.source.publication import PublishedTable


def table(number: int, relation_bytes: int) -> PublishedTable:
    return PublishedTable(
        id=TableId(number),
        name=TableName("public", f"t{number}"),
        row_filter=None,
        columns=None,
        estimated_rows=None,
        relation_bytes=relation_bytes,
        relkind="r",
    )


def ids(units: list[tuple[PublishedTable, ...]]) -> list[list[int]]:
    return [[table.id for table in unit] for unit in units]


def test_small_tables_go_together_and_large_ones_alone_and_first() -> None:
    tables = [table(1, 0), table(2, SMALL_TABLE_BYTES + 1), table(3, 8192), table(4, 10 * SMALL_TABLE_BYTES)]
    assert ids(form_groups(tables)) == [[4], [2], [1, 3]]


def test_a_table_that_kept_others_back_goes_alone() -> None:
    assert ids(form_groups([table(1, 8), table(2, 16), table(3, 24)], alone={TableId(2)})) == [[1, 3], [2]]


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_groups_are_bounded_in_tables_and_in_bytes() -> None:
    many = form_groups([table(number, 8192) for number in range(GROUP_TABLES * 2 + 1)])
    assert sorted(len(unit) for unit in many) == [1, GROUP_TABLES, GROUP_TABLES]
    heavy = form_groups([table(number, SMALL_TABLE_BYTES) for number in range(9)])
    assert sorted(len(unit) for unit in heavy) == [1, 4, 4]
    assert all(sum(one.relation_bytes for one in unit) <= GROUP_BYTES for unit in heavy)


def test_every_table_is_in_one_group() -> None:
    tables = [table(number, number * 100_000) for number in range(200)]
    assert sorted(id for unit in ids(form_groups(tables, alone={TableId(7)})) for id in unit) == list(range(200))


def test_security_groups_are_bounded_in_what_they_lock() -> None:
    roots = [replace(table(number, 8192), relation_count=101) for number in range(6)]
    assert ids(form_groups(roots, most_relations=250)) == [[0, 1], [2, 3], [4, 5]]
    # One beyond the bound is by itself, whatever its size.
    assert ids(form_groups([*roots[:2], replace(table(9, 0), relation_count=251)], most_relations=250)) == [[0, 1], [9]]
