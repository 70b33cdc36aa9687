"""Changes that the writer refuses or counts, because they do not happen with an exact mirror (invariant 18)."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from headwater.changes import Step
from headwater.contracts.results import PendingResult, WriteEventsResult
from headwater.errors import ChangeRefused
from headwater.events import OLD_FULL, EventBatch
from headwater.lsn import EndLsn
from headwater.schema.leaves import LeafIdentity
from headwater.schema.table import ReplicaIdentity, ReplicatedTableSchema, TableId
from tests.integration.lake_destination import (
    ID_V,
    ONE_TRANSACTION,
    Lake,
    change_run,
    delete,
    insert,
    table_schema,
    truncate,
    update,
)
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS


def of_leaves(schema: ReplicatedTableSchema) -> ReplicatedTableSchema:
    """As the schema of a partitioned table whose leaves have keys of their own, without the partition key."""
    return ReplicatedTableSchema(replace(schema.table_schema, leaves=LeafIdentity(schema.key, strict_inserts=True)))


@pytest.mark.invariant(18)
def test_updates_and_deletes_that_find_no_row_are_counted_and_logged_and_inserts_are_not(
    lake: Lake, caplog: pytest.LogCaptureFixture
) -> None:
    keyed, emptied = table_schema(*ID_V), table_schema(*ID_V)
    whole = table_schema(*ID_V, key=(), replica_identity=ReplicaIdentity.FULL)
    for schema in (keyed, emptied, whole):
        lake.copy(schema, [(1, "a"), (2, "b"), (3, "c")])
    found = [update(1, "A"), delete(2, None), update(13, "moved", old=(3, None)), insert(4, "d")]
    passing = [insert(5, "x"), update(5, "y"), delete(5, None)]
    tables: dict[TableId, list[Step]] = {
        keyed.id: [
            change_run(keyed, 200, *found, *passing, update(8, "new"), delete(9, None), update(11, "n", old=(10, None)))
        ],
        emptied.id: [truncate(emptied, 200), change_run(emptied, 201, insert(1, "a"), delete(2, None))],
        whole.id: [
            change_run(whole, 200, delete(1, "a", kind=OLD_FULL), delete(9, "gone", kind=OLD_FULL), insert(4, "d"))
        ],
    }
    result = WriteEventsResult()
    pending = PendingResult(result)
    with caplog.at_level(logging.WARNING):
        lake.destination.write_events(EventBatch(tables, ONE_TRANSACTION, EndLsn(1)), result)
        pending.wait()
    assert pending.missed == {keyed.id: 3, emptied.id: 1, whole.id: 1}
    assert sum("found no row" in record.message for record in caplog.records) == 3
    assert lake.rows(keyed) == [(1, "A"), (11, "n"), (13, "moved"), (4, "d"), (8, "new")]
    assert lake.rows(whole) == [(2, "b"), (3, "c"), (4, "d")]


@pytest.mark.invariant(18)
def test_where_only_leaves_keep_a_key_unique_an_insert_of_a_key_that_exists_is_an_error_of_the_table(
    lake: Lake,
) -> None:
    schema = of_leaves(table_schema(*ID_V))
    lake.copy(schema, [(1, "a"), (2, "b")])
    # Deleted before, or by the same run, it does not exist.
    lake.write(change_run(schema, 200, delete(1, None), insert(1, "again"), insert(3, "c"), update(2, "B")))
    with pytest.raises(ChangeRefused, match="cannot be applied"):
        lake.write(change_run(schema, 300, insert(2, "another"), insert(4, "d"), delete(9, None)))
    assert lake.rows(schema) == [(1, "again"), (2, "B"), (3, "c")]
