"""The contracts of a store: schemas, states and progress, and the lifecycle operations over all of them.

All methods are called from several threads at once and must be thread-safe. A store keeps a cache: `get_*` of states and
metadata read the cache, `load_*` fill it once at start. A store that is unreachable raises StoreUnavailable; then no table is
marked failed (invariant 15).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from threading import Event

from headwater.contracts.metadata import AppliedDestinationTableMetadata, DestinationTableMetadata, SchemaStatus
from headwater.errors import StoreError
from headwater.lsn import EndLsn
from headwater.schema.table import SnapshotId, TableId, TableSchema
from headwater.states import TableState
from headwater.wire.settings import ConnectSettings


@dataclass(frozen=True, slots=True)
class WorkerType:
    """Whose progress: the apply worker's (no table) or a table sync worker's."""

    table_id: TableId | None = None

    @property
    def is_apply(self) -> bool:
        return self.table_id is None

    def __str__(self) -> str:
        return "apply" if self.table_id is None else f"table_sync:{self.table_id}"


APPLY = WorkerType()


@dataclass(frozen=True, slots=True)
class Lineage:
    """The cluster and the timeline whose WAL all recorded positions refer to. On another one they mean nothing."""

    system_identifier: str
    timeline: int


@dataclass(frozen=True, slots=True)
class TableSchemaRetention:
    """Keep the newest schema version at or before this position, and all newer ones."""

    lsn: EndLsn


class SchemaStore(ABC):
    """Versioned table schemas."""

    @abstractmethod
    def get_table_schema(self, table_id: TableId, snapshot_id: SnapshotId) -> TableSchema | None:
        """The version with the largest snapshot_id at or below the one asked for; may read persistent storage on a miss."""

    @abstractmethod
    def get_table_schemas(self) -> Sequence[TableSchema]:
        """All cached versions, without reading persistent storage."""

    @abstractmethod
    def load_table_schemas(self) -> int:
        """Fill the cache from persistent storage; once at start. Returns how many."""

    @abstractmethod
    def store_table_schema(self, table_schema: TableSchema) -> TableSchema:
        """Save a version in cache and storage; the same version again replaces it."""

    @abstractmethod
    def prune_table_schemas(self, table_schema_retentions: Mapping[TableId, TableSchemaRetention]) -> int:
        """Remove versions older than the newest one at or before each boundary, in cache and storage. Returns how many."""


class StateStore(ABC):
    """Table states, durable progress and destination metadata."""

    def interrupt_with(self, stop: Event) -> None:  # noqa: B027 - optional
        """Called once before `start`. Once `stop` is set the run is ending, and a call that waits for a server that does not
        answer should give up within seconds, with StoreUnavailable. A store that never waits need not implement it."""

    def is_in(self, source: ConnectSettings) -> bool:
        """Whether what is recorded goes into the source database itself. Called at start, before `start`: only then must the
        source be a server that can be written, and its role be allowed to create the namespace `headwater`."""
        return False

    def start(self) -> None:  # noqa: B027 - optional
        """Called once before any other call of a run: migrations and connections belong here."""

    def close(self) -> None:  # noqa: B027 - optional
        """Called once after the last call of a run, also of one that failed to start."""

    def begin_run(self, token: str) -> None:  # noqa: B027 - optional
        """This object writes for the run `token` from here on, and no earlier run writes any more.

        Called by the pipeline, once a run, when it has the pipeline's lock and before anything is recorded. A run can lose the
        lock without noticing (its process was stopped, its network was cut), so for a short while two runs may
        both believe that they hold it. A store that another process can reach must record the token and refuse every
        write of an object whose token is another one: in the same atomic step as the write, with PipelineLocked.
        Objects on which this was never called belong to commands, which write beside a run on purpose. The default does
        nothing, for stores that end with their process. Usual mistake: to check the token first and write afterwards.
        """

    def check_run(self) -> None:  # noqa: B027 - optional
        """Raise PipelineLocked if another run has begun since `begin_run`. Called when the lock was lost and taken again."""

    @abstractmethod
    def get_table_state(self, table_id: TableId) -> TableState | None: ...

    @abstractmethod
    def get_table_states(self) -> Mapping[TableId, TableState]: ...

    @abstractmethod
    def load_table_states(self) -> int:
        """Fill the cache from persistent storage: at start, and every few seconds of a run.

        So a running pipeline notices that the user asked for a new copy of a table, by setting its state to Init. It
        must only read: an idle pipeline writes nothing (invariant 9).
        """

    @abstractmethod
    def update_table_states(self, updates: Sequence[tuple[TableId, TableState]]) -> None:
        """All or none, in cache and storage. A state that is kept in memory only is refused.

        Where the storage has an Init that the cache does not have, another process has put it there to ask for a new
        copy, and it stays; the next `load_table_states` shows it. A store that no other process writes need not check this.
        """

    def update_table_state(self, table_id: TableId, state: TableState) -> None:
        self.update_table_states([(table_id, state)])

    @abstractmethod
    def rollback_table_state(self, table_id: TableId) -> TableState:
        """Go back to the state before the last recorded one and return it; StoreError if there is none."""

    @abstractmethod
    def get_replication_progress(self, worker_type: WorkerType) -> EndLsn | None: ...

    @abstractmethod
    def upsert_replication_progress(self, worker_type: WorkerType, flush_lsn: EndLsn) -> EndLsn:
        """Record progress; never moves back. Returns what is stored then."""

    @abstractmethod
    def delete_replication_progress(self, worker_type: WorkerType) -> None:
        """Delete a worker's progress, when its slot's lineage is reset on purpose."""

    @abstractmethod
    def get_lineage(self) -> Lineage | None:
        """What `record_lineage` recorded last; None before the first time. Read at start and after a reconnect to the source."""

    @abstractmethod
    def record_lineage(self, lineage: Lineage) -> None:
        """Record which cluster and timeline the recorded positions belong to. Called before the first position of a lineage is
        recorded."""

    def get_table_fingerprints(self) -> Mapping[TableId, str]:
        """All that `store_table_fingerprints` recorded, from storage. Called once, at start.

        A fingerprint is what the catalog showed of a table when it was copied; opaque text. The default keeps none: then
        every start copies every table again, with a log line that says why.
        """
        return {}

    def store_table_fingerprints(self, updates: Mapping[TableId, str]) -> None:  # noqa: B027 - optional
        """Replace the fingerprints of these tables, all or none. Called when a copy is planned, and when the catalog changed."""

    @abstractmethod
    def get_destination_table_metadata(self, table_id: TableId) -> DestinationTableMetadata | None: ...

    def get_applied_destination_table_metadata(self, table_id: TableId) -> AppliedDestinationTableMetadata | None:
        """The metadata, only when the destination's schema is fully applied; StoreError while it is being applied."""
        metadata = self.get_destination_table_metadata(table_id)
        if metadata is not None and metadata.schema_status is not SchemaStatus.APPLIED:
            raise StoreError(
                f"the schema of destination table {metadata.destination_table_id} is not fully applied",
                detail=f"its status is {metadata.schema_status}",
                hint="Start the pipeline again; the table is copied again if it cannot continue.",
            )
        return metadata

    @abstractmethod
    def load_destination_tables_metadata(self) -> int: ...

    @abstractmethod
    def store_destination_tables_metadata(self, updates: Mapping[TableId, DestinationTableMetadata]) -> None:
        """All or none, in cache and storage."""

    def store_destination_table_metadata(self, table_id: TableId, metadata: DestinationTableMetadata) -> None:
        self.store_destination_tables_metadata({table_id: metadata})


class OperationKind(StrEnum):
    PREPARE_FOR_COPY = "prepare_for_copy"
    RESET_FOR_RESYNC = "reset_for_resync"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class TableStateOperation:
    kind: OperationKind
    table_id: TableId | None = None


class TableStateLifecycleStore(ABC):
    """Operations over state, schemas, metadata and progress that must be atomic."""

    @abstractmethod
    def apply_table_state_operation(self, operation: TableStateOperation) -> int:
        """Carry out one operation, in one transaction, caches included. Returns the number of tables it touched."""

    def prepare_table_state_for_copy(self, table_id: TableId) -> None:
        """Delete metadata, schema versions and table sync progress; keep the table's state. Only after the drop succeeded."""
        self.apply_table_state_operation(TableStateOperation(OperationKind.PREPARE_FOR_COPY, table_id))

    def reset_table_states_for_resync(self) -> int:
        """All states back to Init, no apply progress and no lineage; metadata, schemas and table sync progress are kept.

        Whether a table was copied before (`TableState.copied`) is kept too.
        """
        return self.apply_table_state_operation(TableStateOperation(OperationKind.RESET_FOR_RESYNC))

    def delete_table_state(self, table_id: TableId) -> None:
        """Delete all that is recorded of a table that left the publication. The destination's table is not touched."""
        self.apply_table_state_operation(TableStateOperation(OperationKind.DELETE, table_id))


class DestinationStore(SchemaStore, StateStore, ABC):
    """What destinations see of a store: schemas and state, no lifecycle."""


class PipelineStore(DestinationStore, TableStateLifecycleStore, ABC):
    """What the pipeline needs: all three contracts. A custom store derives from this one, or from each of the three."""
