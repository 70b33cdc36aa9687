"""What a table sync worker defers while other tables are handed over."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headwater.config.pipeline import BatchConfig
from headwater.engine.hand_off import Positions
from headwater.engine.table_sync.catch_up import CatchUp
from headwater.events import EventBatch, SourceRead, Transactions
from headwater.lsn import EndLsn
from headwater.observability.progress import Progress
from headwater.schema.table import TableId

MAX_BYTES = 100


class Batches:
    """A follower that has these to seal."""

    def __init__(self, *batches: EventBatch) -> None:
        self.positions = Positions.at(EndLsn(0))
        self._batches = list(batches)

    def seal(self, fail: object) -> EventBatch | None:
        return self._batches.pop(0)


class Written:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def persist(self, batch: EventBatch, *, may_read_on: bool) -> Mapping[TableId, SourceRead]:
        self.sizes.append(batch.size_bytes)
        return {}


def batch_of(end: int, size_bytes: int) -> EventBatch:
    one = np.ones(1, np.int64)
    transactions = Transactions(one.astype(np.uint64), one.astype(np.uint64), one, one.astype(np.uint32), one - 1, one)
    return EventBatch({TableId(1): []}, transactions, EndLsn(end), size_bytes)


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_a_large_batch_is_never_put_together_with_what_came_before_or_comes_after() -> None:
    """It may lie on disk, and would come into memory."""
    batches = [batch_of(end, size) for end, size in ((10, 1), (20, 2), (30, MAX_BYTES + 1), (40, 4), (50, 5))]
    tables = SimpleNamespace(working=[SimpleNamespace(id=TableId(1))], what="table t")
    written = Written()
    parts = cast(Any, SimpleNamespace(progress=Progress(), all=dict))
    catch_up = CatchUp(
        BatchConfig(max_bytes=MAX_BYTES),
        cast(Any, tables),
        parts,
        cast(Any, Batches(*batches)),
        parts,
        cast(Any, written),
        parts,
        parts,
        parts,
    )
    for _ in batches:
        catch_up._seal_and_defer()
    catch_up._write_out()
    assert written.sizes == [1 + 2, MAX_BYTES + 1, 4 + 5]
