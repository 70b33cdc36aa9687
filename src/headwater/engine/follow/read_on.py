"""Reading the stream on for a table whose missing value is not certain (invariant 12).

The destination read the row in the source, at a later moment than its batch's: what was committed in between is needed to tell
whether it is the same row. The batch is handed over again with what followed it. Bounded: a table for which too much would
have to be read, or for which it does not end, is copied again.
"""

from __future__ import annotations

from collections.abc import Mapping

from headwater.config.pipeline import BatchConfig
from headwater.events import EventBatch, SourceRead
from headwater.lsn import EndLsn
from headwater.schema.table import TableId

_TIMES = 5
"""Each time the source is read again. If a row changes its key that often, its table is copied again."""


def reads_until(reads: Mapping[TableId, SourceRead]) -> EndLsn:
    return max(read.position for read in reads.values())


def may_read_on(batch: EventBatch, times: int, config: BatchConfig) -> bool:
    """A large transaction lies on disk: put together with what follows it, it would come into memory."""
    return times < _TIMES and batch.size_bytes <= config.max_bytes
