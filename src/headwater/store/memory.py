"""A store in memory: behaves like a persistent one, and is lost with the process. Also the cache of a persistent one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from headwater.contracts.metadata import DestinationTableMetadata
from headwater.contracts.stores import (
    APPLY,
    Lineage,
    OperationKind,
    PipelineStore,
    TableSchemaRetention,
    TableStateOperation,
    WorkerType,
)
from headwater.errors import StoreError
from headwater.lsn import EndLsn
from headwater.schema.table import SnapshotId, TableId, TableSchema
from headwater.states import TableState, to_be_copied

HISTORY_KEPT = 16
"""Earlier states kept for rollback; also the bound in update_states of queries.sql."""


class MemoryStore(PipelineStore):
    """Not persistent: a pipeline with this store copies its tables again after a restart."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._schemas: dict[TableId, dict[SnapshotId, TableSchema]] = {}
        # The current state first, then the earlier ones.
        self._states: dict[TableId, list[TableState]] = {}
        self._progress: dict[WorkerType, EndLsn] = {}
        self._metadata: dict[TableId, DestinationTableMetadata] = {}
        self._lineage: Lineage | None = None
        self._fingerprints: dict[TableId, str] = {}

    def get_table_schema(self, table_id: TableId, snapshot_id: SnapshotId) -> TableSchema | None:
        with self._lock:
            versions = self._schemas.get(table_id, {})
            newest = max((version for version in versions if version <= snapshot_id), default=None)
            return None if newest is None else versions[newest]

    def get_table_schemas(self) -> Sequence[TableSchema]:
        with self._lock:
            return [schema for versions in self._schemas.values() for schema in versions.values()]

    def load_table_schemas(self) -> int:
        return len(self.get_table_schemas())

    def store_table_schema(self, table_schema: TableSchema) -> TableSchema:
        with self._lock:
            self._schemas.setdefault(table_schema.id, {})[table_schema.snapshot_id] = table_schema
            return table_schema

    def prune_table_schemas(self, table_schema_retentions: Mapping[TableId, TableSchemaRetention]) -> int:
        removed = 0
        with self._lock:
            for table_id, retention in table_schema_retentions.items():
                versions = self._schemas.get(table_id, {})
                kept = max((version for version in versions if version <= retention.lsn.value), default=None)
                old = [version for version in versions if kept is not None and version < kept]
                for version in old:
                    del versions[version]
                removed += len(old)
        return removed

    def get_table_state(self, table_id: TableId) -> TableState | None:
        with self._lock:
            states = self._states.get(table_id)
            return states[0] if states else None

    def get_table_states(self) -> Mapping[TableId, TableState]:
        with self._lock:
            return MappingProxyType({table_id: states[0] for table_id, states in self._states.items()})

    def load_table_states(self) -> int:
        return len(self.get_table_states())

    def update_table_states(self, updates: Sequence[tuple[TableId, TableState]]) -> None:
        refuse_memory_only(updates)
        with self._lock:
            for table_id, state in dict(updates).items():
                states = self._states.setdefault(table_id, [])
                if not states or states[0] != state:
                    states.insert(0, state)
                    del states[1 + HISTORY_KEPT :]

    def rollback_table_state(self, table_id: TableId) -> TableState:
        with self._lock:
            states = self._states.get(table_id, [])
            if len(states) < 2:
                raise nothing_to_roll_back_to(table_id, states[0] if states else None)
            del states[0]
            return states[0]

    def get_replication_progress(self, worker_type: WorkerType) -> EndLsn | None:
        with self._lock:
            return self._progress.get(worker_type)

    def upsert_replication_progress(self, worker_type: WorkerType, flush_lsn: EndLsn) -> EndLsn:
        with self._lock:
            stored = max(flush_lsn, self._progress.get(worker_type, flush_lsn))
            self._progress[worker_type] = stored
            return stored

    def delete_replication_progress(self, worker_type: WorkerType) -> None:
        with self._lock:
            self._progress.pop(worker_type, None)

    def get_lineage(self) -> Lineage | None:
        with self._lock:
            return self._lineage

    def record_lineage(self, lineage: Lineage) -> None:
        with self._lock:
            self._lineage = lineage

    def get_table_fingerprints(self) -> Mapping[TableId, str]:
        with self._lock:
            return dict(self._fingerprints)

    def store_table_fingerprints(self, updates: Mapping[TableId, str]) -> None:
        with self._lock:
            self._fingerprints.update(updates)

    def get_destination_table_metadata(self, table_id: TableId) -> DestinationTableMetadata | None:
        with self._lock:
            return self._metadata.get(table_id)

    def load_destination_tables_metadata(self) -> int:
        with self._lock:
            return len(self._metadata)

    def store_destination_tables_metadata(self, updates: Mapping[TableId, DestinationTableMetadata]) -> None:
        with self._lock:
            self._metadata.update(updates)

    def apply_table_state_operation(self, operation: TableStateOperation) -> int:
        with self._lock:
            if operation.kind is OperationKind.RESET_FOR_RESYNC:
                self._states = {table_id: [to_be_copied(states[0])] for table_id, states in self._states.items()}
                self._progress.pop(APPLY, None)
                self._lineage = None
                return len(self._states)
            table_id = table_of(operation)
            gone: list[object] = [
                self._metadata.pop(table_id, None),
                self._schemas.pop(table_id, None),
                self._progress.pop(WorkerType(table_id), None),
            ]
            if operation.kind is OperationKind.DELETE:
                gone += [self._states.pop(table_id, None), self._fingerprints.pop(table_id, None)]
            return int(any(gone))

    def replace_states(self, states: Mapping[TableId, TableState]) -> None:
        """Make these the only states, with nothing to roll back to. For a store that keeps this one as its cache."""
        with self._lock:
            self._states = {table_id: [state] for table_id, state in states.items()}

    def replace_state(self, table_id: TableId, state: TableState) -> None:
        with self._lock:
            self._states[table_id] = [state]

    def replace_schemas(self, schemas: Sequence[TableSchema]) -> None:
        with self._lock:
            self._schemas = {}
            for schema in schemas:
                self.store_table_schema(schema)

    def replace_metadata(self, metadata: Mapping[TableId, DestinationTableMetadata]) -> None:
        with self._lock:
            self._metadata = dict(metadata)


def refuse_memory_only(updates: Sequence[tuple[TableId, TableState]]) -> None:
    for table_id, state in updates:
        if not state.persisted:
            raise StoreError(
                f"state {state} of table {table_id} is kept in memory only",
                detail="a store was asked to record it",
                hint="Record only states that survive a restart; the workers keep the others in memory.",
            )


def nothing_to_roll_back_to(table_id: TableId, current: TableState | None) -> StoreError:
    return StoreError(
        f"table {table_id} has no earlier state to go back to",
        detail="the store has no state of it" if current is None else f"{current} is the first on record",
        hint="Copy the table again instead, with `headwater resync`.",
    )


def table_of(operation: TableStateOperation) -> TableId:
    if operation.table_id is None:
        raise StoreError(
            f"the operation {operation.kind} names no table",
            detail="only a reset concerns all tables",
            hint="Give TableStateOperation a table_id.",
        )
    return operation.table_id
