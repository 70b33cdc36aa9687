"""The memory destination keeps what it is given."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from headwater.contracts.results import DropTableForCopyResult, PendingResult, WriteEventsResult, WriteTableRowsResult
from headwater.destinations.memory import MemoryDestination
from headwater.errors import DestinationError
from headwater.events import EventBatch, TableRows, Transactions, Truncate, TruncateStep
from headwater.lsn import CommitLsn, EndLsn
from headwater.schema.table import ColumnSchema, ReplicatedTableSchema, TableId, TableName, TableSchema
from headwater.schema.types import BUILT_IN

SCHEMA = ReplicatedTableSchema(TableSchema(TableId(1), TableName("p", "t"), (ColumnSchema("id", BUILT_IN[20]),)))
NOBODY = Transactions(*(np.zeros(0, t) for t in (np.uint64, np.uint64, np.int64, np.uint32, np.int64, np.int64)))  # type: ignore[arg-type]


def no_spark() -> None:
    raise AssertionError("no Spark here")


def test_it_keeps_rows_and_events_and_fails_once_on_request() -> None:
    destination = MemoryDestination()
    batch = pa.record_batch({"id": [1, 2]})
    rows = TableRows("e", EndLsn(1), no_spark, lambda: iter([batch]))  # type: ignore[arg-type]
    copied = WriteTableRowsResult()
    destination.write_table_rows(SCHEMA, rows, copied)
    PendingResult(copied).wait()
    assert destination.rows(TableId(1)) == [(1,), (2,)]
    events = EventBatch({TableId(1): [TruncateStep(SCHEMA, CommitLsn(5), 0, 0, 0)]}, NOBODY, EndLsn(6))
    destination.fail_next()
    first, second = WriteEventsResult(), WriteEventsResult()
    destination.write_events(events, first)
    with pytest.raises(DestinationError):
        PendingResult(first).wait()
    destination.write_events(events, second)
    PendingResult(second).wait()
    assert destination.events() == [Truncate(CommitLsn(5), 0, SCHEMA, False, False)]
    dropped = DropTableForCopyResult()
    destination.drop_table_for_copy(SCHEMA, dropped)
    PendingResult(dropped).wait()
    assert destination.copied_tables() == set()
