"""What a table sync worker's copies read: schemas, ranges, identities of partitions, from the catalog under the tables' lock."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headwater.config.pipeline import PipelineConfig
from headwater.contracts.stores import PipelineStore
from headwater.engine.source import Source
from headwater.engine.table_states import TableStates
from headwater.engine.table_sync.copy_cores import CopyShare
from headwater.engine.table_sync.groups import SMALL_TABLE_BYTES
from headwater.engine.table_sync.slot import CopyInterrupted, SyncSlot
from headwater.engine.table_sync.table_copy import TableCopy
from headwater.engine.table_sync.tables import SyncTable, SyncTables
from headwater.errors import Retry, SchemaError, ServerError
from headwater.observability.progress import Progress
from headwater.schema.table import ReplicatedTableSchema, SnapshotId, TableId
from headwater.source.catalog import load_table_schemas
from headwater.source.leaves import check_unique, identity_of_leaves
from headwater.source.publication import PublishedTable, published_tables
from headwater.source.session import Connection, impatient
from headwater.source.table_lock import TableLock, taken_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CATALOG_SECONDS = 0.5
_LOCK_NOT_AVAILABLE = "55P03"


class CopyPlanner:
    """Used by the worker's thread, once, while the lock is held."""

    def __init__(
        self,
        config: PipelineConfig,
        source: Source,
        store: PipelineStore,
        table_states: TableStates,
        progress: Progress,
        spark: SparkSession | None,
        lock: TableLock,
        slot: SyncSlot,
        admin: Connection,
        what: str,
    ) -> None:
        self._config = config
        self._source = source
        self._settings = source.named(slot.name)
        self._store = store
        self._table_states = table_states
        self._progress = progress
        self._spark = spark
        self._lock = lock
        self._slot = slot
        self._admin = admin
        self._what = what

    def plan(self, tables: SyncTables, share: CopyShare) -> None:
        """A plan and a `TableCopy` for each table that still works; one that cannot be copied is failed."""
        published, schemas = self._read_catalog(tables)

        def plan(table: SyncTable) -> None:
            table.published = published.get(table.id, table.published)
            if tables.is_group and table.published.relation_bytes > SMALL_TABLE_BYTES:
                # It has grown since it was listed, and would keep the others waiting.
                tables.send_back(table, alone=True)
                return
            self._plan_table(table, schemas.get(table.id), share)

        tables.each(plan)

    def _read_catalog(
        self, tables: SyncTables
    ) -> tuple[dict[TableId, PublishedTable], dict[TableId, ReplicatedTableSchema]]:
        """Again under the lock: row filter and column list may be others than when the tables joined.

        On a session without locks: the server's function opens every table of the publication. With our lock in the same
        session, another session that has locked one of them and waits for ours would be in a deadlock with us.
        """
        publication, ids = self._source.publication, [table.id for table in tables.working]
        try:
            with impatient(self._admin, _CATALOG_SECONDS):
                published = {table.id: table for table in published_tables(self._admin, publication, ids)}
                snapshot_id = SnapshotId(self._slot.start.value)
                return published, load_table_schemas(self._admin, ids, publication, snapshot_id)
        except ServerError as error:
            if error.sqlstate != _LOCK_NOT_AVAILABLE:
                raise
            raise CopyInterrupted(self._what, taken_tables(self._admin, ids)) from error

    def _plan_table(self, table: SyncTable, schema: ReplicatedTableSchema | None, share: CopyShare) -> None:
        if schema is None or not schema.columns:
            raise SchemaError(
                f"table {table.published.name} has nothing to copy",
                detail="it was dropped, or the publication sends none of its columns",
                hint="It leaves the pipeline when it leaves the publication.",
                retry=Retry.TIMED,
            )
        schema = self._with_leaves(table, schema)
        self._store.store_table_schema(schema.table_schema)
        cores = self._spark.sparkContext.defaultParallelism if self._spark is not None else 1
        plan = self._lock.plan(
            table.published,
            schema,
            target_range_bytes=share.range_bytes,
            parallelism=min(cores, share.connections),
        )
        # The first copy only: a later one replaces what was followed since, and has to bring all of it.
        if not self._table_states.was_copied(table.id) and not self._config.table_sync_copy.copies(
            str(table.published.name)
        ):
            plan = replace(plan, ranges=())
        table.schema = schema
        table.copy = TableCopy(
            self._config.id,
            self._spark,
            self._progress,
            table.published,
            schema,
            plan,
            self._settings,
            self._slot.exported_snapshot,
            share.connections,
        )

    def _with_leaves(self, table: SyncTable, schema: ReplicatedTableSchema) -> ReplicatedTableSchema:
        """A partitioned table with the identity that its leaves have in common; an error of the table's if there is none."""
        if not table.published.is_partitioned or table.fingerprint is None:
            return schema
        identity = identity_of_leaves(table.fingerprint)
        if identity.strict_inserts:
            self._check_unique(table.published, identity.key)
        return ReplicatedTableSchema(replace(schema.table_schema, leaves=identity), schema.replication_mask)

    def _check_unique(self, table: PublishedTable, key: tuple[str, ...]) -> None:
        try:
            check_unique(self._settings, self._slot.exported_snapshot, table, key, self._source.locks_for_a_copy)
        except ServerError as error:
            if error.sqlstate != _LOCK_NOT_AVAILABLE:
                raise
            raise CopyInterrupted(self._what, taken_tables(self._admin, [table.id])) from error
