"""The pipeline: what a user starts, waits for and shuts down.

One thread supervises: it starts table sync workers, watches the lock, the JVM and every worker, and ends the run in order.
One run of a pipeline at a time, by a session advisory lock held for the whole run (invariant 6).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.config.pipeline import InvalidatedSlotBehavior, PipelineConfig
from headwater.contracts.destination import Destination, RunContext
from headwater.contracts.stores import PipelineStore
from headwater.engine.apply_worker import ApplyWorker
from headwater.engine.board import Board
from headwater.engine.heartbeat import Heartbeat
from headwater.engine.lake_look import look_at_destination
from headwater.engine.memory import MemoryMonitor, spool, stream_budget
from headwater.engine.opening import open_slot, settle_states
from headwater.engine.retry import retrying, waits
from headwater.engine.run import Run
from headwater.engine.run_lock import VERIFY_SECONDS, RunLock
from headwater.engine.source_rows import SourceRows
from headwater.engine.stop import Stop
from headwater.engine.tables import TableSyncPool
from headwater.engine.watch import Watch
from headwater.errors import HeadwaterError, Meaning, SparkLost, meaning, said_by, show_values, where_raised
from headwater.observability.progress import Progress
from headwater.source.catalog_look import CatalogLooks
from headwater.source.lock import PipelineLock
from headwater.source.preflight import check_source
from headwater.source.publication import published_tables
from headwater.source.server import server_facts
from headwater.source.session import connect
from headwater.source.slot_errors import LineageLost
from headwater.spark.session import jvm_alive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.25
_PATIENCE_SECONDS = 20.0
"""How long table sync workers may take to stop. One that waits for a lock of somebody else's has nothing to finish."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What works side by side from one opening of the slot on."""

    worker: ApplyWorker
    pool: TableSyncPool
    watch: Watch
    heartbeat: Heartbeat


class Pipeline:
    """Keeps a destination in step with a publication. `start` once, then `wait`; `shutdown` from anywhere."""

    def __init__(
        self,
        config: PipelineConfig,
        store: PipelineStore,
        destination: Destination,
        *,
        spark: SparkSession | None = None,
        progress: Progress | None = None,
    ) -> None:
        config.validate()
        self.config = config
        self.progress = progress if progress is not None else Progress()
        self._store = store
        self._destination = destination
        self._spark = spark
        self._settings = config.pg_connection.connect_settings(f"headwater_{config.id}")
        self._memory = MemoryMonitor(config.memory_backpressure, config.memory_refresh_interval_ms / 1000)
        self._stop = Stop()
        self._round = self._stop.part()
        """The stop of what was opened last: a slot that was lost ends a round, and another may begin."""
        self._lost: LineageLost | None = None
        self._ended = threading.Event()
        self._error: HeadwaterError | None = None
        self._thread: threading.Thread | None = None
        self._destination_started = False
        self._system_identifier = ""
        self._run_token = uuid.uuid4().hex
        self._lock = RunLock(PipelineLock(self._settings, config.id), store, self._run_token)
        self._board: Board | None = None

    @property
    def stopped(self) -> bool:
        return self._ended.is_set()

    def start(self) -> None:
        """Check everything, then start the workers. Raises with all findings at once if the source is not ready."""
        if self._thread is not None:
            raise HeadwaterError(
                f"pipeline {self.config.id} was started before",
                hint="Make a new Pipeline object for another run.",
            )
        show_values(self.config.show_values_in_errors)
        self._lock.acquire()
        try:
            self._memory.start()
            parts = self._open()
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(
            target=self._supervise, args=(parts,), name=f"headwater-pipeline-{self.config.id}", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the run has ended; raise what ended it. False if the timeout passed first."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        # In short steps: a signal handler runs in the main thread only between them.
        while not self._ended.wait(0.2):
            if deadline is not None and time.monotonic() >= deadline:
                return False
        if self._error is not None:
            raise self._error
        return True

    def shutdown(self) -> None:
        """Ask for an orderly stop: batches under way are finished, recorded and confirmed. Returns at once."""
        self._stop.set()

    def _open(self) -> _Parts:
        config = self.config
        self._round = self._stop.part()
        with connect(self._settings) as connection:
            for finding in check_source(connection, config, store_in_source=config.store_pg_connection is None):
                log.warning("%s", finding)
            server = server_facts(connection)
            self._store.start()
            self._lock.begin()
            for load in ("load_table_states", "load_table_schemas", "load_destination_tables_metadata"):
                getattr(self._store, load)()
            board = Board(self._store, self.progress)
            run = Run(
                config,
                self._settings,
                self._store,
                self._destination,
                self._spark,
                self.progress,
                board,
                server,
                self._memory,
                spool(config.batch),
                stream_budget(config.batch, self._memory),
                self._lock,
                stop=self._round,
            )
            # The look first: what changes between the two is then found by the next one.
            looks = CatalogLooks(config.publication_name)
            look = looks.look(connection)
            tables = [t for t in published_tables(connection, config.publication_name) if t.id in look.tables]
            self._start_destination(run)
            start = open_slot(run, connection)
            settle_states(run, connection, tables, look)
        look_at_destination(run)
        pool = TableSyncPool(run, tables, self._fail)
        return _Parts(ApplyWorker(run, start), pool, Watch(run, pool, looks, look), Heartbeat(run))

    def _start_destination(self, run: Run) -> None:
        """Once a run, which belongs to one cluster."""
        system_identifier = run.server.system_identifier
        self._board = run.board
        if not self._destination_started:
            context = RunContext(
                self.config.id,
                system_identifier,
                SourceRows(self._settings).read,
                database_oid=run.server.database_oid,
                run_token=self._run_token,
                timeline=lambda: self._board.timeline if self._board is not None else None,
            )
            self._destination.start(context)
            self._destination_started = True
        elif self._lost is not None and self._system_identifier != system_identifier:
            raise self._lost
        self._system_identifier = system_identifier

    def _supervise(self, opened: _Parts) -> None:
        parts: _Parts | None = opened
        try:
            while parts is not None:
                self._run_round(parts)
                self._await_destination(parts.pool)
                parts = self._open_again()
        except Exception as error:
            self._fail(_as_headwater(error))
        finally:
            try:
                self._close()
            finally:
                self._ended.set()

    def _await_destination(self, pool: TableSyncPool) -> None:
        """Before another round: there is one call for a table at a time, and what lands late would undo the new copy."""
        while self._lost is not None and not self._stop.is_set() and pool.in_destination:
            self.progress.waiting("the destination to leave the copies that were under way")
            self._watch()
            self._stop.wait(_LEAVE_SECONDS)
        self.progress.waiting(None)

    def _open_again(self) -> _Parts | None:
        """After the slot was lost under a run that may make a new one: opening finds that out, and copies again."""
        if self._lost is None:
            return None

        def open_again() -> _Parts | None:
            if self._stop.is_set():
                return None
            self._lock.require(self._stop)
            return self._open()

        parts = retrying("opening the slot again", open_again, progress=self.progress, pause=self._pause)
        self._lost = None
        return parts

    def _pause(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _run_round(self, parts: _Parts) -> None:
        worker, pool = parts.worker, parts.pool
        apply_thread = threading.Thread(target=self._run_apply, args=(worker,), name="headwater-apply", daemon=True)
        apply_thread.start()
        watched = 0.0
        try:
            while not self._round.is_set():
                parts.watch.look_if_due()
                parts.heartbeat.beat_if_due()
                self._start_due(pool)
                if time.monotonic() - watched > VERIFY_SECONDS:
                    self._watch()
                    watched = time.monotonic()
                pool.bell.wait(0.25)
        except Exception as error:
            self._fail(_as_headwater(error))
        finally:
            self._round.set()
            worker.wake()
            # After a lost JVM nothing of a write can end in order; the threads die with the process.
            lost = isinstance(self._error, SparkLost)
            apply_thread.join(2.0 if lost else None)
            pool.join(2.0 if lost else _PATIENCE_SECONDS)
            if self._error is None:
                parts.watch.settle()
            parts.watch.close()
            parts.heartbeat.close()

    def _start_due(self, pool: TableSyncPool) -> None:
        if not self._lock.is_held:
            return
        try:
            pool.start_due()
        except HeadwaterError as error:
            if not waits(error):
                raise
            # Asked again in the next round: a store that is unreachable is no reason to end the run (invariant 15).
            log.warning("tables have to wait: %s", error.summary)
            self._stop.wait(VERIFY_SECONDS)

    def _run_apply(self, worker: ApplyWorker) -> None:
        try:
            worker.run()
        except Exception as error:
            self._fail(_as_headwater(error))

    def _watch(self) -> None:
        """Raise if the run may not go on."""
        if self._spark is not None and not jvm_alive(self._spark):
            raise SparkLost(
                "the JVM that runs Spark is gone",
                detail="lake commits that were under way may or may not have happened",
                hint="Start the pipeline again; it looks for the watermarks and goes on from there.",
            )
        self._lock.verify()

    def _fail(self, error: HeadwaterError) -> None:
        """The first error is the one that ended the run; whatever follows from it is only logged."""
        if meaning(error) is Meaning.STOPPING:
            self._stop.set()
            return
        recreates = self.config.invalidated_slot_behavior is InvalidatedSlotBehavior.RECREATE
        if isinstance(error, LineageLost) and recreates and self._lost is None and self._error is None:
            self._lost = error
            self._round.set()
            return
        if self._error is None:
            self._error = error
            self.progress.error(str(error))
        else:
            log.warning("while stopping: %s", error)
        self._stop.set()

    def _close(self) -> None:
        if self._destination_started:
            self._destination_started = False
            self._end("the destination's shutdown", self._destination.shutdown)
        self._end("closing the store", self._store.close)
        self._memory.stop()
        self._end("releasing the pipeline's lock", self._lock.release)

    @staticmethod
    def _end(what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            log.warning("%s failed: %s", what, error)


def _as_headwater(error: Exception) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        return error
    log.error("unexpected failure: %s\n%s", said_by(error), where_raised(error))
    return HeadwaterError(
        "the pipeline failed unexpectedly",
        detail=said_by(error),
        hint="This is a defect of Headwater; report it with the log. Starting again goes on where it was.",
    )
