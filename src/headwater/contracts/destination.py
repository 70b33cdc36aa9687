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
    """What a destination may know of the run it serves."""

    pipeline_id: int
    system_identifier: str
    read_source_rows: Callable[[ReplicatedTableSchema, pa.Table], SourceRead]
    """Reads the present rows of the given keys (columns of `schema.key`) from the source; rows that are gone are missing in
    the answer. For the rare change that refers to a value which no one else has (invariant 12). The answer is younger than
    the batch: whether it may be used, and what to do if not, is said at `WriteEventsResult.reads_on`."""
    database_oid: int = 0
    """With the system identifier and a table's oid: names the one source table that a lake table mirrors."""
    run_token: str = ""
    """Names this run. It goes into each watermark, so that what a lost run still commits can be recognised."""
    timeline: Callable[[], int | None] = lambda: None
    """The source's timeline as the apply worker follows it now; None while that is not known."""


class Destination(ABC):
    """Where rows and changes go. Delivery is at least once: every write may come again after a failure or a restart."""

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

        Called after `start`, before any write, and again when the source answers as another server; may block. A
        destination that is ahead of its source has what the source lost: after a failover, or in front of a restored
        backup, when the store went back with the source. The default, None, leaves that to what the store recorded.
        """
        return None

    def missing_tables(self, table_ids: Sequence[TableId]) -> Mapping[TableId, HeadwaterError]:
        """Which of these tables the destination does not have as the store recorded them, and what it found instead.

        Called after `start`, before any write, for tables that are not to be copied anyway; may block. Gone, without a
        position, of another copy, behind what was recorded, or another owner's: the table errs at once, by its error's
        `retry`. The default, none, leaves it to the first write to find out. Usual mistake: to name every table
        while the destination is unreachable; raise DestinationUnavailable then.
        """
        return {}

    @abstractmethod
    def drop_table_for_copy(
        self, replicated_table_schema: ReplicatedTableSchema, result: DropTableForCopyResult
    ) -> None:
        """End the old copy of a table, before its state in the store is cleared and a new copy begins.

        Called by a table sync worker's thread with the schema that was stored for the old copy; the engine waits for the
        result at once. Must bear being called twice, and for a table that is not there. Usual mistake: to fail when the
        object is already gone.
        """

    @abstractmethod
    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        """Write the rows of a table's copy.

        Called by a table sync worker's thread, once for a copy, also when the table is empty, so that the object exists
        before changes come. The engine waits for the result at once. A copy that failed is started again with a new epoch:
        must bear being called again. Usual mistake: to append to what an earlier, broken copy left.
        """

    @abstractmethod
    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        """Write whole transactions.

        Called by the apply worker for its tables, and by table sync workers while they catch up. May return before the
        work is done: the engine fills the next batch meanwhile, and hands it over only after this result is completed.
        Where single tables fail and the rest is durable, `result.failed_tables` says which: they are errored, the rest
        counts. A result that is dropped is a failure; so is one that misses `destination_deadline_ms`, where it is set.
        After a failure or a restart the same transactions come again, perhaps cut into other batches. Usual mistake: to
        remember what was written anywhere else than in the write itself.
        """
