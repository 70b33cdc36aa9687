"""The copies of a worker's tables, under one lock and at one exported snapshot (invariant 1).

Small tables of a group are read in one Spark job first; then each is written by a call of its own, some at once, with an
outcome of its own. The lock is looked at until the last copy is durable: one that was lost may have let a rewrite through.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from headwater.contracts.results import Result, WriteTableRowsResult
from headwater.engine.destination_calls import call
from headwater.engine.retry import waits
from headwater.engine.run import Run
from headwater.engine.table_sync.copy_cores import CopyCores, CopyShare
from headwater.engine.table_sync.groups import HELD_BYTES, SMALL_TABLE_BYTES
from headwater.engine.table_sync.slot import GaveWay, SyncSlot
from headwater.engine.table_sync.table_copy import TableCopy, cancel_tagged, tagged
from headwater.engine.table_sync.tables import SyncTable, SyncTables
from headwater.engine.wake_up import WakeUp
from headwater.errors import HeadwaterError, Meaning, Retry, SchemaError, ServerError, meaning
from headwater.schema.table import ReplicatedTableSchema, SnapshotId, TableId
from headwater.source.catalog import load_table_schemas
from headwater.source.leaves import check_unique, identity_of_leaves
from headwater.source.publication import PublishedTable, published_tables
from headwater.source.session import Connection, impatient
from headwater.source.table_lock import TableLock, taken_tables, waits_for_each_other
from headwater.spark.errors import translate
from headwater.spark.small_tables import NO_ROWS, HeldRows, ReadTable, read_in_one_job
from headwater.states import FINISHED_COPY

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_CHECK_SECONDS = 1.0
_CATALOG_SECONDS = 0.5
_LOCK_NOT_AVAILABLE = "55P03"


class _GroupRead(Result):
    what = "the read of a group"


class SyncCopy:
    """Used by the worker's thread, once."""

    def __init__(
        self,
        run: Run,
        tables: SyncTables,
        lock: TableLock,
        slot: SyncSlot,
        admin: Connection,
        cores: CopyCores,
        wake_up: WakeUp,
    ) -> None:
        self._run = run
        self._tables = tables
        self._lock = lock
        self._slot = slot
        self._settings = replace(run.settings, application_name=slot.name)
        self._admin = admin
        self._cores = cores
        self._wake_up = wake_up
        self._checked = time.monotonic()

    def copy(self) -> None:
        """Every table that still works in the end is durable in the destination, and FinishedCopy."""
        if self._tables.is_group:
            self._plan(CopyShare(self._cores.beside_changes))
            self._read_together()
            self._write()
            return
        with self._cores.share(alone=len(self._run.table_states.all()) == 1) as share:
            self._plan(share)
            self._write()

    # What is to be read

    def _plan(self, share: CopyShare) -> None:
        published, schemas = self._read_catalog()

        def plan(table: SyncTable) -> None:
            table.published = published.get(table.id, table.published)
            if self._tables.is_group and table.published.relation_bytes > SMALL_TABLE_BYTES:
                # It has grown since it was listed, and would keep the others waiting.
                self._tables.send_back(table, alone=True)
                return
            self._plan_table(table, schemas.get(table.id), share)

        self._tables.each(plan)

    def _read_catalog(self) -> tuple[dict[TableId, PublishedTable], dict[TableId, ReplicatedTableSchema]]:
        """Again under the lock: row filter and column list may be others than when the tables joined.

        On a session without locks: the server's function opens every table of the publication. With our lock in the same
        session, whoever has taken another of them and wants ours would be in a deadlock with us, and might be its victim.
        """
        publication, ids = self._run.config.publication_name, [table.id for table in self._tables.working]
        try:
            with impatient(self._admin, _CATALOG_SECONDS):
                published = {table.id: table for table in published_tables(self._admin, publication, ids)}
                snapshot_id = SnapshotId(self._slot.start.value)
                return published, load_table_schemas(self._admin, ids, publication, snapshot_id)
        except ServerError as error:
            if error.sqlstate != _LOCK_NOT_AVAILABLE:
                raise
            raise GaveWay(self._tables.what, taken_tables(self._admin, ids)) from error

    def _plan_table(self, table: SyncTable, schema: ReplicatedTableSchema | None, share: CopyShare) -> None:
        run = self._run
        if schema is None or not schema.columns:
            raise SchemaError(
                f"table {table.published.name} has nothing to copy",
                detail="it was dropped, or the publication sends none of its columns",
                hint="It leaves the pipeline when it leaves the publication.",
                retry=Retry.TIMED,
            )
        schema = self._with_leaves(table, schema)
        run.store.store_table_schema(schema.table_schema)
        cores = run.spark.sparkContext.defaultParallelism if run.spark is not None else 1
        plan = self._lock.plan(
            table.published,
            schema,
            target_range_bytes=share.range_bytes,
            parallelism=min(cores, share.connections),
        )
        # The first copy only: a later one replaces what was followed since, and has to bring all of it.
        if not run.table_states.was_copied(table.id) and not run.config.table_sync_copy.copies(
            str(table.published.name)
        ):
            plan = replace(plan, ranges=())
        table.schema = schema
        table.copy = TableCopy(
            run, table.published, schema, plan, self._settings, self._slot.exported_snapshot, share.connections
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
            check_unique(self._settings, self._slot.exported_snapshot, table, key, self._run.locks_for_a_copy)
        except ServerError as error:
            if error.sqlstate != _LOCK_NOT_AVAILABLE:
                raise
            raise GaveWay(self._tables.what, taken_tables(self._admin, [table.id])) from error

    # The rows of small tables

    def _read_together(self) -> None:
        """Fill in the rows of all small tables by one job. A table that it could not read is read by itself, or fails."""
        spark = self._run.spark
        if spark is None:
            return  # read by the driver, a batch at a time, when the destination asks
        copies = {table: table.copy for table in self._tables.working if table.copy is not None}
        for copy in copies.values():
            if copy.plan.estimated_bytes == 0:
                # No blocks now, under the lock, so none at the snapshot.
                copy.held = NO_ROWS
        small = [copy.as_small() for copy in copies.values() if copy.held is None]
        tag = f"headwater-copy-{self._run.config.id}-{self._slot.name}"
        outcomes: dict[TableId, ReadTable] = {}
        at_once = self._cores.beside_changes

        def read(result: _GroupRead) -> None:
            outcomes.update(read_in_one_job(spark, small, at_once, HELD_BYTES))
            result.done()

        pending = call(
            f"headwater-read-{self._slot.name}",
            _GroupRead(),
            lambda result: tagged(spark, tag, lambda: _translated(lambda: read(result))),
        )
        try:
            pending.on_done(self._wake_up.notify)
            self._await(lambda: pending.done)
            pending.raise_if_failed()
        except HeadwaterError as error:
            cancel_tagged(spark, tag)
            self._run.raise_if_stopped()
            if meaning(error) is not Meaning.TABLE:
                raise
            log.warning("%s: each is read by itself, since reading them together failed: %s", self._tables.what, error)
        for table, copy in copies.items():
            outcome = outcomes.get(table.id)
            if isinstance(outcome, HeldRows):
                copy.held = outcome
            elif outcome is not None:
                self._tables.fail(table, outcome)

    # Writing

    def _write(self) -> None:
        waiting, writing = deque(self._tables.working), list[SyncTable]()
        while waiting or writing:
            while waiting and len(writing) < self._run.config.max_copy_connections_per_table:
                writing.append(self._begin(waiting.popleft()))
            ended = self._await_any(writing)
            writing = [table for table in writing if table not in ended]
            if not self._finish(ended):
                # The destination or the source is away. What is not begun has nothing to lose by another attempt.
                while waiting:
                    self._tables.send_back(waiting.popleft(), alone=False)

    def _await_any(self, writing: list[SyncTable]) -> list[SyncTable]:
        def ended() -> list[SyncTable]:
            return [table for table in writing if not table.is_busy or table.stop.is_set()]

        self._await(lambda: bool(ended()))
        return ended()

    def _begin(self, table: SyncTable) -> SyncTable:
        copy, schema, run = table.copy, table.schema, self._run
        assert copy is not None
        assert schema is not None
        run.require_lock()
        rows, write = copy.rows(self._slot.start), run.destination.write_table_rows
        table.pending = call(
            f"headwater-copy-{table.published.name}",
            WriteTableRowsResult(),
            lambda result: copy.in_job_group(lambda: write(schema, rows, result)),
            run.deadline_seconds,
        )
        table.pending.on_done(self._wake_up.notify)
        return table

    def _finish(self, ended: list[SyncTable]) -> bool:
        """Take over what the destination made of these copies. False if it is away."""
        durable, there = list[SyncTable](), True
        for table in ended:
            assert table.pending is not None
            if table.stop.is_set():
                self._tables.end(table)
                continue
            try:
                table.pending.raise_if_failed()
                durable.append(table)
            except HeadwaterError as error:
                there = there and not waits(error)
                self._tables.fail(table, error)
        if durable:
            self._lock.check()
            for table in durable:
                assert table.copy is not None
                table.copy.finished()
            self._tables.move(durable, FINISHED_COPY)
        return there

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait with an eye on a stop, on the lock, and on those who wait for it."""
        while not condition():
            self._wake_up.wait(_LOOK_SECONDS)
            self._run.raise_if_stopped()
            for table in self._tables.working:
                if table.copy is not None and table.is_busy:
                    table.copy.report()
            if time.monotonic() - self._checked > _CHECK_SECONDS:
                self._lock.check()
                if waits_for_each_other(self._lock.connection, self._slot.name, self._lock.backend_pid):
                    raise GaveWay(self._tables.what, taken_tables(self._lock.connection, self._lock.table_ids))
                self._checked = time.monotonic()


def _translated(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        raise translate(error) from error
