"""The watermark is found, held against the record, and decides what is left of a batch."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from headwater.config import CatalogConfig, CatalogType, DestinationConfig
from headwater.contracts.metadata import Watermark
from headwater.destinations.iceberg.pruning import MAX_LISTED_KEYS, key_predicate
from headwater.destinations.iceberg.types import quote, quote_string
from headwater.destinations.iceberg.warehouse import spark_catalog, warehouse_path
from headwater.destinations.iceberg.watermark import (
    check_lineage,
    find_watermark,
    mark_of,
    parse_summary,
    snapshot_properties,
    steps_after,
)
from headwater.errors import WatermarkError
from headwater.events import ChangeRun, TruncateStep
from headwater.lsn import CommitLsn
from headwater.schema.table import ColumnSchema, ReplicatedTableSchema, TableId, TableName, TableSchema
from headwater.schema.types import BUILT_IN
from headwater.secret import Secret

SCHEMA = ReplicatedTableSchema(
    TableSchema(TableId(1), TableName("public", "t"), (ColumnSchema("id", BUILT_IN[20], primary_key=True),))
)


def mark(lsn: int, ordinal: int = 0, epoch: str = "e", pipeline: int = 1) -> Watermark:
    return Watermark(pipeline, "7", epoch, CommitLsn(lsn), ordinal)


def run(*keys: tuple[int, int]) -> ChangeRun:
    size = len(keys)
    return ChangeRun(
        SCHEMA,
        np.full(size, ord("I"), np.uint8),
        np.array([lsn for lsn, _ in keys], np.uint64),
        np.array([ordinal for _, ordinal in keys], np.int64),
        np.zeros(size, np.int64),
        np.arange(size),
        pa.table({"id": np.arange(size)}),
        np.zeros(size, np.uint8),
    )


def truncate(lsn: int, ordinal: int = 0) -> TruncateStep:
    return TruncateStep(SCHEMA, CommitLsn(lsn), ordinal, 0, 0)


def test_a_watermark_survives_the_summary_of_a_lake_snapshot() -> None:
    assert parse_summary(snapshot_properties(mark(0xFFFFFFFF_FFFFFFFF, 5))) == mark(0xFFFFFFFF_FFFFFFFF, 5)
    assert parse_summary({"headwater.commit-lsn": "0/1"}) is None


@pytest.mark.invariant(5)
def test_the_search_passes_commits_without_a_watermark_and_ends_where_the_epoch_opened() -> None:
    ours, older = snapshot_properties(mark(10)), snapshot_properties(mark(99, epoch="old"))
    assert find_watermark([(3, {}), (2, ours), (1, older)]) == mark(10)
    assert find_watermark([(3, {}), (2, {"headwater.opens-epoch": "true"}), (1, older)]) is None
    assert find_watermark([]) is None


def test_a_lake_that_is_level_or_ahead_goes_on() -> None:
    assert check_lineage("t", mark(10, 3), mark(10, 3)) == mark(10, 3)
    assert check_lineage("t", mark(11, 0), mark(10, 3)) == mark(11, 0)


@pytest.mark.parametrize(
    ("found", "recorded"),
    [
        (None, mark(10)),
        (mark(10), None),
        (mark(9, 9), mark(10)),
        (mark(10, 1), mark(10, 2)),
        (mark(20, epoch="other"), mark(10)),
        (mark(20, pipeline=2), mark(10)),
    ],
)
def test_none_less_or_another_lineage_is_an_error_that_says_resync(
    found: Watermark | None, recorded: Watermark | None
) -> None:
    with pytest.raises(WatermarkError) as raised:
        check_lineage("public.t", found, recorded)
    assert "headwater resync" in raised.value.hint


def test_what_the_watermark_covers_is_dropped() -> None:
    (left,) = steps_after([run((10, 0), (10, 1), (10, 2), (11, 0))], mark(10, 1))
    assert isinstance(left, ChangeRun)
    assert list(zip(left.commit_lsn.tolist(), left.ordinal.tolist(), strict=True)) == [(10, 2), (11, 0)]
    assert steps_after([run((10, 0))], mark(10, 1)) == []
    assert steps_after([truncate(10, 1)], mark(10, 1)) == []


@pytest.mark.promise("between rows of one transaction")
def test_only_the_last_truncate_and_what_follows_it_is_left() -> None:
    first, second, third = run((20, 0)), run((22, 0)), run((24, 0))
    left = steps_after([first, truncate(21), second, truncate(23), third], mark(10))
    assert [type(step) for step in left] == [TruncateStep, ChangeRun]
    assert mark_of(left[0], mark(1)) == mark(23)
    assert mark_of(left[1], mark(1)) == mark(24)


def test_a_key_predicate_lists_few_integers_bounds_many_and_leaves_other_types_alone() -> None:
    few = pa.table({"a b": [3, 1, 3], "t": ["x", "y", "z"]})
    assert key_predicate(few, ("a b", "t")) == " AND t.`a b` IN (1, 3)"
    many = pa.table({"k": range(-5, MAX_LISTED_KEYS)})
    assert key_predicate(many, ("k",)) == f" AND t.`k` BETWEEN -5 AND {MAX_LISTED_KEYS - 1}"


def test_names_and_strings_are_quoted_for_spark() -> None:
    assert quote("a`b") == "`a``b`"
    assert quote_string("it's \\ here") == "'it\\'s \\\\ here'"


def test_the_embedded_catalog_is_the_default_and_another_one_is_a_setting() -> None:
    embedded = spark_catalog(DestinationConfig(warehouse="/lake"))
    assert embedded["spark.sql.catalog.lake.uri"].startswith("jdbc:sqlite:file:/lake/catalog.db")
    rest = DestinationConfig(
        warehouse="s3://b/w/",
        catalog=CatalogConfig(type=CatalogType.REST, name="x", uri="http://c", properties={"token": Secret("s3cret")}),
    )
    assert spark_catalog(rest)["spark.sql.catalog.x.type"] == "rest"
    assert spark_catalog(rest)["spark.sql.catalog.x.warehouse"] == "s3://b/w"
    assert warehouse_path(rest) is None
    assert "s3cret" not in repr(rest)
