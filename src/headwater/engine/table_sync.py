"""A table sync worker: copies one table under lock and exported snapshot, follows its own slot, hands the table over.

Publication, then lock, then slot with exported snapshot, then copy (invariant 1). It comes close to the server's position
before it asks for the hand-off, so that the apply worker's pause is short.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from headwater.contracts.results import (
    DropTableForCopyResult,
    PendingResult,
    WriteEventsResult,
    WriteTableRowsResult,
)
from headwater.contracts.stores import WorkerType
from headwater.engine.bell import Bell
from headwater.engine.calls import call
from headwater.engine.copying import CopyProgress
from headwater.engine.ownership import SyncOwnership, needs_text
from headwater.engine.retry import WORLD, Backoff
from headwater.engine.run import Run
from headwater.engine.slot_stream import SlotStream
from headwater.engine.slot_watch import SlotWatch
from headwater.errors import HeadwaterError, Retry, SchemaError, ShutdownRequested, SparkLost
from headwater.events import EventBatch, TableRows
from headwater.lsn import EndLsn
from headwater.schema.table import ReplicatedTableSchema, SnapshotId, quote_identifier
from headwater.source.catalog import load_table_schemas
from headwater.source.copy_read import copy_batches
from headwater.source.exported_snapshot import TableLock, table_lock, waits_for_each_other
from headwater.source.publication import PublishedTable, published_tables
from headwater.source.server import flush_lsn
from headwater.source.session import Connection, connect
from headwater.source.slots import drop_slot, sync_slot_name
from headwater.states import DATA_SYNC, FINISHED_COPY, INIT, SYNC_WAIT, Actor, Phase, sync_done
from headwater.wire.connection import WireConnection
from headwater.wire.pgoutput import PgOutputDecoder

log = logging.getLogger(__name__)

_CLOSE_BYTES = 1 << 20
"""So near to the server's position that the rest is a matter of milliseconds."""
_STILL_GAINING = 0.7
"""Under steady traffic the distance shrinks to what is committed during one write, and no further: then is the time to ask."""
_LOOK_SECONDS = 0.2
_SETTLE_SECONDS = 30.0


class SchemaChangedMeanwhile(HeadwaterError):
    """The table's schema changed between its copy and its hand-off: the copy starts again at once."""

    default_retry = Retry.TIMED


class GaveWay(HeadwaterError):
    """A statement on the source wants the table for itself and we were in each other's way: it goes first."""

    default_retry = Retry.TIMED


@dataclass(frozen=True, slots=True)
class _Slot:
    connection: WireConnection
    name: str
    start: EndLsn
    exported_snapshot: str


class TableSyncWorker:
    """Runs in a thread of its own (`run`), once; the pipeline starts another for another attempt."""

    def __init__(self, run: Run, table: PublishedTable, on_fatal: Callable[[HeadwaterError], None]) -> None:
        # With a stop of its own: a table that leaves, or is to be copied anew, is no reason for the others to stop.
        self._run_ = replace(run, stop=run.stop.part())
        self._whole_run = run
        self._table = table
        self._on_fatal = on_fatal
        self._pending: PendingResult | None = None
        self._bell = Bell()
        self._slot_name = sync_slot_name(run.config.id, table.id)
        self._settings = replace(run.settings, application_name=self._slot_name)
        self.wait_seconds: float | None = None
        """Set when the attempt failed for a reason that may pass: how long to wait before the next."""
        self.left_slot: str | None = None
        """Set when the slot could not be dropped: somebody has to, or it holds WAL for ever."""

    def stop(self) -> None:
        """Ask for an end, from any thread. Nothing is recorded; the slot stays and is the pool's to drop."""
        self._run_.stop.set()

    def run(self) -> None:
        ring = self._bell.ring
        self._run_.board.listen(ring)
        try:
            self._attempt()
        finally:
            self._run_.board.unlisten(ring)
            self._await_destination()

    def _await_destination(self) -> None:
        """Another attempt, or the end of the table, comes only after this one has left the destination.

        At a stop of the whole run nobody comes after us, and nobody waits.
        """
        if self._pending is not None:
            with suppress(HeadwaterError):
                self._pending.wait(self._whole_run.stop)

    def _attempt(self) -> None:
        try:
            self._sync()
        except ShutdownRequested:
            pass  # never recorded: the copy starts again with the next run
        except SparkLost as error:
            self._on_fatal(error)
        except HeadwaterError as error:
            self._failed(error)
        except Exception as error:
            log.exception("table %s: the table sync worker failed", self._table.name)
            self._failed(
                HeadwaterError(
                    f"table sync of {self._table.name} failed",
                    detail=f"{type(error).__name__}: {error}",
                    hint="This is a defect of Headwater; report it with the log. The table is tried again.",
                    retry=Retry.TIMED,
                )
            )

    def _sync(self) -> None:
        run = self._run_
        with connect(self._settings) as admin:
            drop_slot(admin, self._slot_name)
            self._end_old_copy()
            run.board.move(self._table.id, DATA_SYNC, Actor.TABLE_SYNC)
            slot, schema = self._copy(admin)
            stream = None
            try:
                run.board.move(self._table.id, FINISHED_COPY, Actor.TABLE_SYNC)
                options = run.stream_options(binary=not needs_text(schema))
                stream = SlotStream(slot.connection, slot.name, slot.start, options, self._bell)
                position = self._follow(stream, slot, schema, admin)
                # Before the slot is given up: the apply worker stands still until it sees this.
                run.board.move(self._table.id, sync_done(position), Actor.TABLE_SYNC)
            finally:
                if stream is not None:
                    stream.close()
                slot.connection.close()
            self._give_up_slot(admin)

    def _give_up_slot(self, admin: Connection) -> None:
        try:
            drop_slot(admin, self._slot_name)
        except HeadwaterError as error:
            self.left_slot = self._slot_name
            log.warning("slot %s could not be dropped, trying again later: %s", self._slot_name, error.message)

    # Copy

    def _end_old_copy(self) -> None:
        run = self._run_
        old = run.stored_schema(self._table.id)
        if old is not None:
            drop = run.destination.drop_table_for_copy
            dropping = self._pending = call(
                "headwater-drop", DropTableForCopyResult(), lambda result: drop(old, result), run.deadline_seconds
            )
            dropping.wait(run.stop)
        run.store.prepare_table_state_for_copy(self._table.id)

    def _copy(self, admin: Connection) -> tuple[_Slot, ReplicatedTableSchema]:
        run = self._run_
        with table_lock(self._settings, [self._table.id]) as lock:
            slot = self._make_slot(admin, lock)
            try:
                # Read again under the lock: row filter and column list may be others than when the table joined.
                published = {t.id: t for t in published_tables(lock.connection, run.config.publication_name)}
                self._table = published.get(self._table.id, self._table)
                found = load_table_schemas(
                    lock.connection, [self._table.id], run.config.publication_name, SnapshotId(slot.start.value)
                )
                schema = found.get(self._table.id)
                if schema is None or not schema.columns:
                    raise SchemaError(
                        f"table {self._table.name} has nothing to copy",
                        detail="it was dropped, or the publication sends none of its columns",
                        hint="It leaves the pipeline when it leaves the publication.",
                        retry=Retry.TIMED,
                    )
                run.store.store_table_schema(schema.table_schema)
                self._write_rows(lock, slot, schema)
            except BaseException:
                slot.connection.close()
                raise
            return slot, schema

    def _make_slot(self, admin: Connection, lock: TableLock) -> _Slot:
        connection = WireConnection.connect(self._settings, replication=True)
        made = threading.Event()
        watch = SlotWatch(self._run_, f"table {self._table.name}", admin, lock.backend_pid, self._slot_name, connection)
        watcher = threading.Thread(
            target=watch.run, args=(made,), name=f"headwater-wait-{self._slot_name}", daemon=True
        )
        watcher.start()
        try:
            command = f"CREATE_REPLICATION_SLOT {quote_identifier(self._slot_name)} LOGICAL pgoutput"
            export = " (SNAPSHOT 'export')" if connection.server_version >= 150000 else " EXPORT_SNAPSHOT"
            row = connection.query(command + export)[0]
        except HeadwaterError:
            connection.close()
            self._run_.raise_if_stopped()
            if watch.gave_way:
                raise self._gave_way() from None
            raise
        finally:
            made.set()
            watcher.join()
        start, snapshot = row["consistent_point"], row["snapshot_name"]
        assert start is not None
        assert snapshot is not None
        return _Slot(connection, self._slot_name, EndLsn.parse(start), snapshot)

    def _gave_way(self) -> GaveWay:
        return GaveWay(
            f"a statement that wants {self._table.name} for itself came in the way of its copy",
            detail="it waited for our lock, and we for it",
            hint="Nothing is to be done: the statement goes first, and the copy starts again after it.",
        )

    def _write_rows(self, lock: TableLock, slot: _Slot, schema: ReplicatedTableSchema) -> None:
        run, settings = self._run_, self._settings
        cores = run.spark.sparkContext.defaultParallelism if run.spark is not None else 1
        plan = lock.plan(self._table, schema, parallelism=min(cores, run.config.max_copy_connections_per_table))
        if not run.config.table_sync_copy.copies(str(self._table.name)):
            plan = replace(plan, ranges=())
        copying = CopyProgress(run, self._table, plan)
        rows = TableRows(
            epoch=uuid.uuid4().hex,
            start_lsn=slot.start,
            make_dataframe=lambda: copying.dataframe(settings, slot.exported_snapshot, schema),
            batches=lambda: copy_batches(settings, slot.exported_snapshot, plan, schema),
        )
        pending = self._pending = call(
            f"headwater-copy-{self._table.name}",
            WriteTableRowsResult(),
            lambda result: copying.in_job_group(lambda: run.destination.write_table_rows(schema, rows, result)),
            run.deadline_seconds,
        )
        try:
            self._await_copy(pending, lock, copying)
        except HeadwaterError as error:
            copying.cancel()
            if not isinstance(error, ShutdownRequested):
                # The attempt ends for certain before another may begin (invariant 6).
                pending.settle(_SETTLE_SECONDS)
            raise
        lock.check()
        copying.finished()

    def _await_copy(self, pending: PendingResult, lock: TableLock, copying: CopyProgress) -> None:
        pending.on_done(self._bell.ring)
        looked = time.monotonic()
        while not pending.done:
            self._bell.wait(_LOOK_SECONDS)
            self._run_.raise_if_stopped()
            copying.report()
            if time.monotonic() - looked > 1.0:
                lock.check()
                if waits_for_each_other(lock.connection, self._slot_name, lock.backend_pid):
                    raise self._gave_way()
                looked = time.monotonic()
        pending.raise_if_failed()

    # Following the own slot up to the hand-off

    def _follow(self, stream: SlotStream, slot: _Slot, schema: ReplicatedTableSchema, admin: Connection) -> EndLsn:
        decoder, ownership = self._run_.decoder(), SyncOwnership(schema, slot.start)
        position, asked, distance = slot.start, 0.0, math.inf
        while True:
            self._run_.raise_if_stopped()
            for chunk in stream.take():
                decoder.feed(chunk.data)
            moved = self._apply(decoder, ownership, stream)
            if moved is not None:
                position = max(position, moved)
            state = self._run_.board.get(self._table.id)
            if state is None:
                raise ShutdownRequested("the table left the publication", hint="Nothing is to be done.")
            if state.phase is Phase.CATCHUP and state.lsn is not None and position >= state.lsn:
                return position
            if time.monotonic() - asked > _LOOK_SECONDS:
                asked = time.monotonic()
                if state.phase is Phase.FINISHED_COPY:
                    before, distance = distance, flush_lsn(admin).value - position.value
                    if distance < _CLOSE_BYTES or (moved is not None and distance > before * _STILL_GAINING):
                        self._run_.board.move(self._table.id, SYNC_WAIT, Actor.TABLE_SYNC)
                stream.request_reply()
            self._bell.wait(_LOOK_SECONDS)

    def _apply(self, decoder: PgOutputDecoder, ownership: SyncOwnership, stream: SlotStream) -> EndLsn | None:
        """Write what has come whole; the position up to which everything of this table is durable, if it moved."""
        run = self._run_
        if not decoder.has_transactions:
            idle = decoder.idle_position
            if idle is not None:
                stream.confirm(idle)
            return idle
        changes = decoder.seal(ownership.assign)
        assert changes is not None
        if ownership.changed:
            raise SchemaChangedMeanwhile(
                f"the schema of {self._table.name} changed during its copy", hint="The table is copied again at once."
            )
        batch = EventBatch.of(changes)
        if batch.tables:
            self._persist(lambda: self._write_events(batch))
            worker = WorkerType(self._table.id)
            self._persist(lambda: run.store.upsert_replication_progress(worker, batch.end_lsn))
        stream.confirm(batch.end_lsn)
        return batch.end_lsn

    def _write_events(self, batch: EventBatch) -> None:
        run, name = self._run_, f"headwater-catchup-{self._table.name}"
        write = run.destination.write_events
        pending = self._pending = call(
            name, WriteEventsResult(), lambda result: write(batch, result), run.deadline_seconds
        )
        pending.wait(run.stop)
        for error in pending.table_errors.values():
            raise error

    def _persist(self, work: Callable[[], object]) -> None:
        """Do it again while the destination or the store is away: that is no reason to throw a finished copy away."""
        backoff = Backoff(0.5)
        while True:
            try:
                work()
                return
            except WORLD as error:
                seconds = backoff.next_seconds()
                log.warning("table %s: trying again in %.1f s: %s", self._table.name, seconds, error)
                self._run_.pause(seconds)

    # Failure

    def _failed(self, error: HeadwaterError) -> None:
        """Back to Init for what may pass by itself, else Errored with the policy that the error asks for."""
        run = self._run_
        if run.stop.is_set():
            return
        log.warning("table %s: %s", self._table.name, error)
        run.progress.error(f"{self._table.name}: {error}")
        self._record_failure_for_certain(error)
        try:
            with connect(self._settings) as admin:
                self._give_up_slot(admin)
        except HeadwaterError:
            self.left_slot = self._slot_name

    def _record_failure_for_certain(self, error: HeadwaterError) -> None:
        """Until it is recorded or the run ends: left in Catchup without a worker, the table would hold all others up for ever."""
        backoff = Backoff(0.5)
        while True:
            try:
                self._record_failure(error)
                return
            except HeadwaterError as trouble:
                log.warning("table %s: its error could not be recorded: %s", self._table.name, trouble)
                if self._run_.stop.wait(backoff.next_seconds()):
                    return

    def _record_failure(self, error: HeadwaterError) -> None:
        run = self._run_
        state = run.board.get(self._table.id)
        if state is None:
            return
        if isinstance(error, (*WORLD, SchemaChangedMeanwhile, GaveWay)):
            self.wait_seconds = 1.0
            if state.phase not in (Phase.INIT, Phase.DATA_SYNC):
                run.board.move(self._table.id, INIT, Actor.TABLE_SYNC)
            elif state.phase is Phase.DATA_SYNC:
                run.board.move(self._table.id, INIT, Actor.PIPELINE)
            return
        error.table_id = self._table.id
        run.board.fail(self._table.id, error, run.config, Actor.TABLE_SYNC)
