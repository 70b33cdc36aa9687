"""The store in Postgres: tables in the namespace `headwater`, keyed by pipeline, with the memory store as cache.

Writing makes WAL in the source, so what is already on record is not written again and reading is left to the cache. The
cache changes after the storage, under the session's lock, so that both see the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from threading import Event
from typing import Any

from headwater.contracts.metadata import DestinationTableMetadata, metadata_from_json, metadata_to_json
from headwater.contracts.stores import (
    Lineage,
    OperationKind,
    PipelineStore,
    TableSchemaRetention,
    TableStateOperation,
    WorkerType,
)
from headwater.errors import PipelineLocked, StoreError
from headwater.lsn import EndLsn
from headwater.schema.table import SnapshotId, TableId, TableSchema, schema_from_json, schema_to_json
from headwater.source.session import Connection
from headwater.states import INIT, Phase, TableState, state_from_json, state_to_json
from headwater.store.connection import Answer, StoreConnection
from headwater.store.memory import MemoryStore, nothing_to_roll_back_to, refuse_memory_only, table_of
from headwater.store.migrate import apply_migrations, read_migrations
from headwater.store.queries import writes
from headwater.store.removal import Removed, is_there, remove_pipeline
from headwater.wire.settings import ConnectSettings

COMPONENT = "store"


class PostgresStore(PipelineStore):
    """Persistent, for one pipeline. Two pipelines in one database do not see each other."""

    def __init__(self, settings: ConnectSettings, pipeline_id: int) -> None:
        self._pipeline_id = pipeline_id
        self._connection = StoreConnection(settings, f"headwater_store_{pipeline_id}")
        self._cache = MemoryStore()
        self._schemas_loaded = False
        self._token: str | None = None

    def interrupt_with(self, stop: Event) -> None:
        self._connection.interrupt_with(stop)

    def is_in(self, source: ConnectSettings) -> bool:
        return self._connection.is_to(source)

    def start(self) -> None:
        """Connect and bring the tables up to date; where they are, nothing is written."""
        self._connection.use(_refuse_standby)
        migrations = read_migrations(resources.files("headwater.store").joinpath("migrations"))
        self._connection.use(lambda connection: apply_migrations(connection, COMPONENT, migrations))

    def close(self) -> None:
        self._connection.close()

    def begin_run(self, token: str) -> None:
        with self._connection:
            self._run("begin_run", token=token)
            self._token = token

    def check_run(self) -> None:
        if self._token is not None and not self._run("run_is_ours"):
            raise PipelineLocked(
                f"another run of pipeline {self._pipeline_id} has taken over",
                detail="the store has the token of a run that began later than this one; this run can record nothing any more",
                hint="Keep the other run, or stop it and start the pipeline again: it continues from the recorded progress.",
            )

    def exists(self) -> bool:
        """Whether there is anything to load: a store that was never started has no tables. Creates none, unlike `start`."""
        return self._connection.use(is_there)

    def remove(self) -> Removed:
        """Delete all state of this pipeline, for good; with that of the last one the namespace goes too."""
        return self._connection.use(lambda connection: remove_pipeline(connection, self._pipeline_id))

    def get_table_schema(self, table_id: TableId, snapshot_id: SnapshotId) -> TableSchema | None:
        if self._schemas_loaded:
            cached = self._cache.get_table_schema(table_id, snapshot_id)
            if cached is not None:
                return cached
        with self._connection:
            rows = self._run("get_schema", table=table_id, snapshot=_lsn_text(snapshot_id))
            return self._cache.store_table_schema(schema_from_json(rows[0][0])) if rows else None

    def get_table_schemas(self) -> Sequence[TableSchema]:
        return self._cache.get_table_schemas()

    def load_table_schemas(self) -> int:
        with self._connection:
            schemas = [schema_from_json(value) for (value,) in self._run("load_schemas")]
            self._cache.replace_schemas(schemas)
            self._schemas_loaded = True
            return len(schemas)

    def store_table_schema(self, table_schema: TableSchema) -> TableSchema:
        with self._connection:
            self._run(
                "store_schema",
                table=table_schema.id,
                snapshot=_lsn_text(table_schema.snapshot_id),
                schema=_json(schema_to_json(table_schema)),
            )
            return self._cache.store_table_schema(table_schema)

    def prune_table_schemas(self, table_schema_retentions: Mapping[TableId, TableSchemaRetention]) -> int:
        if not table_schema_retentions:
            return 0
        with self._connection:
            removed = self._count(
                "prune_schemas",
                tables=list(table_schema_retentions),
                boundaries=[str(retention.lsn) for retention in table_schema_retentions.values()],
            )
            self._cache.prune_table_schemas(table_schema_retentions)
            return removed

    def get_table_state(self, table_id: TableId) -> TableState | None:
        return self._cache.get_table_state(table_id)

    def get_table_states(self) -> Mapping[TableId, TableState]:
        return self._cache.get_table_states()

    def load_table_states(self) -> int:
        with self._connection:
            states = {TableId(table_id): state_from_json(value) for table_id, value in self._run("load_states")}
            self._cache.replace_states(states)
            return len(states)

    def update_table_states(self, updates: Sequence[tuple[TableId, TableState]]) -> None:
        refuse_memory_only(updates)
        with self._connection:
            known = self._cache.get_table_states()
            # In the order of the tables, so that two sessions that update the same ones cannot wait for each other.
            changed = sorted((id, state) for id, state in dict(updates).items() if known.get(id) != state)
            if changed:
                states = [_json(state_to_json(state)) for _, state in changed]
                past_init = [id for id, _ in changed if id in known and known[id].phase is not Phase.INIT]
                tables = [table_id for table_id, _ in changed]
                self._run("update_states", tables=tables, states=states, past_init=past_init)
                self._cache.update_table_states(changed)

    def rollback_table_state(self, table_id: TableId) -> TableState:
        with self._connection:
            rows = self._run("current_state", table=table_id)
            current, previous = rows[0] if rows else (None, None)
            if previous is None:
                raise nothing_to_roll_back_to(table_id, state_from_json(current) if current is not None else None)
            self._run("rollback_state", table=table_id, expected=_json(current))
            state = state_from_json(previous)
            self._cache.replace_state(table_id, state)
            return state

    def get_replication_progress(self, worker_type: WorkerType) -> EndLsn | None:
        with self._connection:
            rows = self._run("get_progress", worker=str(worker_type))
            return self._remember_progress(worker_type, rows[0][0]) if rows else None

    def upsert_replication_progress(self, worker_type: WorkerType, flush_lsn: EndLsn) -> EndLsn:
        with self._connection:
            known = self._cache.get_replication_progress(worker_type)
            if known is not None and not known < flush_lsn:
                return known
            rows = self._run("upsert_progress", worker=str(worker_type), flush=str(flush_lsn))
            return self._remember_progress(worker_type, rows[0][0])

    def _remember_progress(self, worker_type: WorkerType, text: str) -> EndLsn:
        stored = EndLsn.parse(text)
        self._cache.delete_replication_progress(worker_type)
        return self._cache.upsert_replication_progress(worker_type, stored)

    def delete_replication_progress(self, worker_type: WorkerType) -> None:
        with self._connection:
            self._run("delete_progress", worker=str(worker_type))
            self._cache.delete_replication_progress(worker_type)

    def get_lineage(self) -> Lineage | None:
        with self._connection:
            rows = self._run("get_lineage")
            return Lineage(*rows[0]) if rows else None

    def record_lineage(self, lineage: Lineage) -> None:
        with self._connection:
            self._run("record_lineage", system=lineage.system_identifier, timeline=lineage.timeline)

    def get_table_fingerprints(self) -> Mapping[TableId, str]:
        with self._connection:
            return {TableId(table_id): text for table_id, text in self._run("load_fingerprints")}

    def store_table_fingerprints(self, updates: Mapping[TableId, str]) -> None:
        if updates:
            with self._connection:
                tables = sorted(updates)
                self._run("store_fingerprints", tables=tables, fingerprints=[updates[table] for table in tables])

    def get_destination_table_metadata(self, table_id: TableId) -> DestinationTableMetadata | None:
        return self._cache.get_destination_table_metadata(table_id)

    def load_destination_tables_metadata(self) -> int:
        with self._connection:
            loaded = {TableId(table_id): metadata_from_json(value) for table_id, value in self._run("load_metadata")}
            self._cache.replace_metadata(loaded)
            return len(loaded)

    def store_destination_tables_metadata(self, updates: Mapping[TableId, DestinationTableMetadata]) -> None:
        with self._connection:
            known = self._cache.get_destination_table_metadata
            changed = {id: metadata for id, metadata in sorted(updates.items()) if known(id) != metadata}
            if changed:
                values = [_json(metadata_to_json(metadata)) for metadata in changed.values()]
                self._run("store_metadata", tables=list(changed), metadata=values)
                self._cache.store_destination_tables_metadata(changed)

    def apply_table_state_operation(self, operation: TableStateOperation) -> int:
        with self._connection:
            if operation.kind is OperationKind.RESET_FOR_RESYNC:
                rows = self._run("reset_for_resync", init=_json(state_to_json(INIT)))
            else:
                table_id = table_of(operation)
                query = "delete_table" if operation.kind is OperationKind.DELETE else "prepare_for_copy"
                rows = self._run(query, table=table_id, worker=str(WorkerType(table_id)))
            self._cache.apply_table_state_operation(operation)
            return int(rows[0][0])

    def _run(self, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return self._send(name, **parameters).rows

    def _count(self, name: str, **parameters: Any) -> int:
        return self._send(name, **parameters).touched

    def _send(self, name: str, **parameters: Any) -> Answer:
        answer = self._connection.run(name, {"pipeline": self._pipeline_id, "token": self._token, **parameters})
        if writes(name) and not answer.wrote:
            # Nothing was to be written, or another run has taken over. The token of an earlier run is never used again.
            self.check_run()
        return answer


def _refuse_standby(connection: Connection) -> None:
    if connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
        raise StoreError(
            "the store would be in a standby",
            detail="the server that store_pg_connection, or else pg_connection, names is in recovery and takes no writes",
            hint="Set store_pg_connection to the primary, or to another server that can be written.",
        )


def _lsn_text(snapshot_id: SnapshotId) -> str:
    return str(EndLsn(snapshot_id))


def _json(value: Mapping[str, Any]) -> str:
    """Text that jsonb accepts: it has neither NUL nor half a surrogate pair, which messages of other programs may hold."""
    return json.dumps(_clean(value), ensure_ascii=False)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value
