"""Whether a table has been a member all along, from what the catalog said at two moments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.schema.table import TableId, TableName
from headwater.source.membership import Membership

ALONE = Membership(TableId(1), TableName("public", "t"), frozenset({"table:7"}), "iudt", "", "")
ROOT = replace(ALONE, nodes=frozenset({"2@10"}), born=frozenset({"2@10"}))


@pytest.mark.parametrize(
    "after",
    [
        ALONE,
        replace(ALONE, name=TableName("public", "renamed")),
        replace(ALONE, ties=frozenset({"table:7", "schema:9"})),
        replace(ALONE, operations="iud"),
    ],
)
def test_a_member_that_stayed_is_not_copied_again(after: Membership) -> None:
    assert after.continues(ALONE)
    assert after.continues(str(ALONE))


@pytest.mark.parametrize(
    "after",
    [
        replace(ALONE, ties=frozenset({"table:8"})),
        replace(ALONE, row_filter="another"),
        replace(ALONE, columns="1 2"),
    ],
)
def test_a_member_that_left_or_has_other_terms_is_copied_again(after: Membership) -> None:
    assert not after.continues(ALONE)
    assert not after.continues(str(ALONE))


def test_an_operation_that_was_not_published_before_is_a_gap() -> None:
    assert not ALONE.continues(replace(ALONE, operations="iu"))


def test_a_partition_that_was_made_as_one_is_no_gap_and_any_other_coming_or_going_is() -> None:
    assert replace(ROOT, nodes=ROOT.nodes | {"3@11"}, born=ROOT.born | {"3@11"}).continues(ROOT)
    assert not replace(ROOT, nodes=ROOT.nodes | {"3@11"}).continues(ROOT)
    assert not replace(ROOT, nodes=frozenset(), born=frozenset()).continues(ROOT)
