"""What the workers of one run share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwater.config.pipeline import PipelineConfig
from headwater.contracts.destination import Destination
from headwater.contracts.stores import PipelineStore
from headwater.engine.follow.slot_stream import StreamOptions
from headwater.engine.follow.stream_facts import StreamTold
from headwater.engine.memory import MemoryMonitor
from headwater.engine.run_lock import RunLock
from headwater.engine.stop import Stop
from headwater.engine.table_states import TableStates
from headwater.errors import ShutdownRequested
from headwater.observability.progress import Progress
from headwater.schema.table import ReplicatedTableSchema, SnapshotId, TableId
from headwater.source.server import ServerFacts
from headwater.wire.pgoutput import PgOutputDecoder
from headwater.wire.relation import RelationMessage
from headwater.wire.settings import ConnectSettings
from headwater.wire.spool import MemoryBudget, Spool

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NEWEST = SnapshotId(2**63 - 1)
_LONGEST_STATUS_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True)
class Run:
    config: PipelineConfig
    settings: ConnectSettings
    store: PipelineStore
    destination: Destination
    spark: SparkSession | None
    progress: Progress
    table_states: TableStates
    server: ServerFacts
    memory: MemoryMonitor
    spool: Spool
    budget: MemoryBudget
    lock: RunLock
    told: StreamTold = field(default_factory=StreamTold)
    stop: Stop = field(default_factory=Stop)

    @property
    def deadline_seconds(self) -> float | None:
        """How long the destination may take to complete a call."""
        milliseconds = self.config.destination_deadline_ms
        return None if milliseconds is None else milliseconds / 1000

    @property
    def locks_for_a_copy(self) -> int:
        """How many relations one table sync worker may lock at a time."""
        return self.server.locks_for(self.config.max_table_sync_workers)

    def require_lock(self) -> None:
        """Before each write, record, confirmed position and slot made or dropped: see `RunLock`."""
        self.lock.require(self.stop)

    def raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise ShutdownRequested("the pipeline is stopping", hint="Start the pipeline again to go on.")

    def pause(self, seconds: float) -> None:
        """Wait between attempts; a stop ends the wait at once."""
        self.stop.wait(seconds)
        self.raise_if_stopped()

    def decoder(self) -> PgOutputDecoder:
        """For one connection. All streams together stay within the budget; what goes beyond it goes to disk."""
        return PgOutputDecoder(self.spool, self.budget)

    def stream_options(self, binary: bool) -> StreamOptions:
        timeout = self.server.wal_sender_timeout_ms / 1000
        interval = min(timeout / 3, _LONGEST_STATUS_INTERVAL_SECONDS) if timeout else _LONGEST_STATUS_INTERVAL_SECONDS
        # A server that was given more time may take it.
        silence = max(timeout, self.settings.answer_timeout_seconds)
        return StreamOptions(self.config.publication_name, binary, interval, silence)

    def stored_schema(self, table_id: TableId, relation: RelationMessage | None = None) -> ReplicatedTableSchema | None:
        """The schema a table was copied with, and the columns of it that were copied.

        Without metadata of the destination, those that the fingerprint of the copy has: the stream may send fewer by now.
        """
        schema = self.store.get_table_schema(table_id, _NEWEST)
        if schema is None:
            return None
        metadata = self.store.get_destination_table_metadata(table_id)
        if metadata is not None:
            return ReplicatedTableSchema(schema, metadata.replication_mask)
        fingerprint = self.table_states.fingerprint(table_id)
        if fingerprint is not None:
            copied = {column.attnum for column in fingerprint.columns if fingerprint.replicates(column)}
            return ReplicatedTableSchema(schema, tuple(column.attnum in copied for column in schema.columns))
        if relation is None:
            return ReplicatedTableSchema(schema)
        sent = {column.name for column in relation.columns}
        return ReplicatedTableSchema(schema, tuple(column.name in sent for column in schema.columns))
