"""The contract of a destination: four methods, and what the engine promises around them.

Destinations live on the driver, are never pickled, and are called from several threads at once: one per table sync worker
and one for the apply worker. For one table there is never more than one call at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from headwater.contracts.results import DropTableForCopyResult, WriteEventsResult, WriteTableRowsResult
from headwater.errors import HeadwaterError
from headwater.events import EventBatch, SourceRead, TableRows
from headwater.lsn import EndLsn
from headwater.schema.table import ReplicatedTableSchema, TableId


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a destination is given about the run that calls it."""

    pipeline_id: int
    system_identifier: str
    read_source_rows: Callable[[ReplicatedTableSchema, pa.Table], SourceRead]
    """Reads the current rows of the given keys (columns of `schema.key`) from the source; rows that do not exist any more are
    missing in the answer. For the rare change that refers to a value which neither the batch nor the destination has
    (invariant 12). The answer is newer than the batch: `WriteEventsResult.reads_on` says whether it may be used, and what to do
    if not."""
    database_oid: int = 0
    """With the system identifier and a table's oid, identifies the source table that a lake table mirrors."""
    run_token: str = ""
    """Identifies this run. It goes into each watermark, so that commits of a run that lost its lock can be recognised."""
    timeline: Callable[[], int | None] = lambda: None
    """The source's timeline as the apply worker follows it now; None while that is not known."""


class Destination(ABC):
    """Where rows and changes are written. Delivery is at least once: every write may come again after a failure or a restart."""

    @classmethod
    @abstractmethod
    def name(cls) -> str:
        """A short name for logs and diagnostics. Called at any time, must not block."""

    def start(self, context: RunContext) -> None:  # noqa: B027 - optional
        """Called once before any other call of a run. May block; raise to refuse the start."""

    def shutdown(self) -> None:  # noqa: B027 - optional
        """Called once when the pipeline stops, after the last write has completed or was given up. The default does nothing."""

    def furthest_position(self, table_ids: Sequence[TableId]) -> EndLsn | None:
        """Just past the last change that any of these tables holds, if the destination keeps positions with its data.

        Called after `start`, before any write, and again when the system identifier or the timeline of the source has changed;
        may block. A destination that is ahead of its source has changes that the source lost: after a failover, or after a
        backup was restored that contained the store as well. With the default, None, only what the store recorded is compared.
        """
        return None

    def missing_tables(self, table_ids: Sequence[TableId]) -> Mapping[TableId, HeadwaterError]:
        """Which of these tables the destination does not have as the store recorded them, and what it found instead.

        Called after `start`, before any write, for tables that are not to be copied anyway; may block. Return a table that does
        not exist any more, has no position, is of another copy, is behind what was recorded, or belongs to another owner: it is
        set to errored at once, with its error's `retry`. With the default, none, the first write finds it out. Usual mistake:
        to return every table while the destination is unreachable; raise DestinationUnavailable then.
        """
        return {}

    @abstractmethod
    def drop_table_for_copy(
        self, replicated_table_schema: ReplicatedTableSchema, result: DropTableForCopyResult
    ) -> None:
        """End the old copy of a table, before its state in the store is cleared and a new copy begins.

        Called by a table sync worker's thread with the schema that was stored for the old copy; the engine waits for the
        result at once. Must accept being called twice, and for a table that does not exist. Usual mistake: to fail when the
        object was already dropped.
        """

    @abstractmethod
    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        """Write the rows of a table's copy.

        Called by a table sync worker's thread, once for a copy, also when the table is empty, so that the object exists
        before changes come. The engine waits for the result at once. A copy that failed is started again with a new epoch:
        must accept being called again. Usual mistake: to append to rows that an earlier, failed copy left.
        """

    @abstractmethod
    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        """Write whole transactions.

        Called by the apply worker for its tables, and by table sync workers while they catch up. May return before the
        work is done: the engine fills the next batch meanwhile, and passes it on only after this result is completed.
        If single tables fail and the rest is durable, name them with `result.failed_tables`: they are set to errored, and the
        rest counts as written. A result that is dropped is a failure; so is one that misses `destination_deadline_ms`, if that
        is set. After a failure or a restart the same transactions come again, perhaps cut into other batches. Usual mistake: to
        record the position that was written anywhere else than in the write itself.
        """
