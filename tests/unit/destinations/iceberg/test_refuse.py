"""What a writer refuses because no source sends it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.destinations.iceberg.refuse import checked
from headwater.errors import ChangeRefused, Retry
from headwater.events import DELETE, INSERT, NO_OLD, OLD_FULL, OLD_KEY, UPDATE, ChangeRun
from headwater.schema.table import ColumnSchema, ReplicaIdentity, ReplicatedTableSchema, TableId, TableName, TableSchema
from headwater.schema.types import BUILT_IN

SECRET = "a value of a row"


def schema(identity: ReplicaIdentity, key: bool) -> ReplicatedTableSchema:
    columns = (ColumnSchema("k", BUILT_IN[25], primary_key=key), ColumnSchema("v", BUILT_IN[25]))
    return ReplicatedTableSchema(TableSchema(TableId(1), TableName("public", "t"), columns, replica_identity=identity))


KEYED = schema(ReplicaIdentity.DEFAULT, True)
NO_KEY = schema(ReplicaIdentity.FULL, False)
NO_IDENTITY = schema(ReplicaIdentity.NOTHING, False)


def one_change(
    table: ReplicatedTableSchema,
    op: int,
    new: tuple[Any, Any] = (None, None),
    old: tuple[Any, Any] = (None, None),
    kind: int = NO_OLD,
    unchanged: str = "",
) -> ChangeRun:
    def rows(row: tuple[Any, Any]) -> pa.Table:
        return pa.table({"k": pa.array([row[0]], pa.string()), "v": pa.array([row[1]], pa.string())})

    return ChangeRun(
        table,
        np.array([op], np.uint8),
        np.array([1], np.uint64),
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        rows(new),
        np.array([kind], np.uint8),
        rows(old) if kind != NO_OLD else None,
        {name: np.ones(1, np.bool_) for name in unchanged},
    )


@pytest.mark.invariant(18)
@pytest.mark.parametrize(
    "change",
    [
        one_change(KEYED, INSERT, (None, SECRET)),
        one_change(KEYED, UPDATE, (None, SECRET)),
        one_change(KEYED, UPDATE, (None, SECRET), unchanged="k"),
        one_change(KEYED, UPDATE, (SECRET, SECRET), (None, SECRET), OLD_KEY),
        one_change(KEYED, DELETE),
        one_change(KEYED, DELETE, old=(None, SECRET), kind=OLD_KEY),
        one_change(KEYED, DELETE, old=(None, SECRET), kind=OLD_FULL),
        one_change(NO_KEY, DELETE),
        one_change(NO_KEY, DELETE, old=(SECRET, None), kind=OLD_KEY),
        one_change(NO_KEY, UPDATE, (SECRET, SECRET), (SECRET, None), OLD_KEY),
        one_change(NO_IDENTITY, UPDATE, (SECRET, SECRET)),
        one_change(NO_IDENTITY, DELETE, old=(SECRET, SECRET), kind=OLD_FULL),
        one_change(NO_IDENTITY, INSERT, (SECRET, None), unchanged="v"),
    ],
)
def test_a_change_that_cannot_be_is_refused_without_showing_its_values_and_the_table_may_be_copied_again(
    change: ChangeRun,
) -> None:
    with pytest.raises(ChangeRefused) as raised:
        checked(change)
    assert "public.t" in raised.value.message
    assert raised.value.hint
    assert raised.value.retry is Retry.TIMED
    assert SECRET not in str(raised.value)


@pytest.mark.invariant(18)
@pytest.mark.parametrize(
    "change",
    [
        one_change(KEYED, INSERT, ("a", None)),
        one_change(KEYED, UPDATE, (None, "b"), ("a", None), OLD_KEY, unchanged="k"),
        one_change(KEYED, DELETE, old=("a", None), kind=OLD_KEY),
        one_change(NO_KEY, INSERT, (None, None)),
        one_change(NO_KEY, DELETE, old=(None, None), kind=OLD_FULL),
        one_change(NO_IDENTITY, INSERT, (None, "b")),
    ],
)
def test_what_a_source_sends_is_taken_as_it_is(change: ChangeRun) -> None:
    assert checked(change) is change
