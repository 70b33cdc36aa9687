"""What a table sync worker puts off while other tables are handed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from headwater.engine.run import Run
from headwater.engine.table_sync.catch_up import SyncFollow
from headwater.engine.table_sync.tables import SyncTables
from headwater.engine.table_sync.write import SyncWrite
from headwater.events import EventBatch, SourceRead, Transactions
from headwater.lsn import ZERO, EndLsn
from headwater.schema.table import TableId

MAX_BYTES = 100


class Writes(SyncFollow):
    """Without a stream: only what is put off, and what is written."""

    def __init__(self) -> None:
        self.written: list[int] = []
        batch = SimpleNamespace(max_bytes=MAX_BYTES)
        self._run = cast(Run, SimpleNamespace(config=SimpleNamespace(batch=batch)))
        self._tables = cast(SyncTables, SimpleNamespace(working=[SimpleNamespace(id=TableId(1))]))
        self._write = cast(SyncWrite, SimpleNamespace(persist=self._persist))
        self._unwritten = None
        self._position = self._written = self._reads_on_until = ZERO
        self._read_on = 0
        self._busy = set()

    def _persist(self, batch: EventBatch, *, may_read_on: bool) -> dict[TableId, SourceRead]:
        self.written.append(batch.size_bytes)
        return {}


def batch_of(end: int, size_bytes: int) -> EventBatch:
    one = np.ones(1, np.int64)
    transactions = Transactions(one.astype(np.uint64), one.astype(np.uint64), one, one.astype(np.uint32), one - 1, one)
    return EventBatch({TableId(1): []}, transactions, EndLsn(end), size_bytes)


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_a_giant_is_never_put_together_with_what_came_before_or_comes_after() -> None:
    """It may lie on disk, and would come into memory."""
    follow = Writes()
    for end, size in ((10, 1), (20, 2), (30, MAX_BYTES + 1), (40, 4), (50, 5)):
        follow._put_off(batch_of(end, size))
    follow._write_out({TableId(1)})
    assert follow.written == [1 + 2, MAX_BYTES + 1, 4 + 5]
