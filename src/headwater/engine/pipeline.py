"""The pipeline: what a user starts, waits for and shuts down.

One thread supervises: it starts every worker, and ends the run in order. It waits for no server and for no JVM: what asks one
(the catalog and the table sync workers to start, the heartbeat, the lock, the JVM, another opening) has a thread of its own.
One run of a pipeline at a time, by a session advisory lock held for the whole run (invariant 6).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headwater.config.pipeline import InvalidatedSlotBehavior, PipelineConfig
from headwater.contracts.destination import Destination, RunContext
from headwater.contracts.stores import PipelineStore
from headwater.engine.apply.lineage import SlotLineage
from headwater.engine.memory import MemoryMonitor
from headwater.engine.retry import retrying
from headwater.engine.run_guard import RunGuard
from headwater.engine.run_lock import VERIFY_SECONDS, RunLock
from headwater.engine.source import Source
from headwater.engine.stop import Stop
from headwater.engine.supervise.destination_look import look_at_destination
from headwater.engine.supervise.resume import PipelineSlot, settle_states
from headwater.engine.supervise.round import Facilities, Round, decoders
from headwater.engine.supervise.side_thread import (
    LEAVE_SECONDS,
    SideThread,
    aside,
    join_if_started,
    start_when_possible,
)
from headwater.engine.table_states import TableStates
from headwater.errors import (
    HeadwaterError,
    Meaning,
    PipelineLocked,
    meaning,
    said_by,
    show_values,
    where_raised,
)
from headwater.limits import limit_reached, naming_limits
from headwater.observability.progress import Progress
from headwater.source.catalog_look import CatalogLooks
from headwater.source.lock import PipelineLock
from headwater.source.preflight import check_source
from headwater.source.publication import published_tables
from headwater.source.rows import source_rows_reader
from headwater.source.server import ServerFacts, server_facts
from headwater.source.session import connect
from headwater.source.slot_errors import LineageLost
from headwater.spark.errors import jvm_alive, jvm_lost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.25
_JVM_SECONDS = 2.0
"""How long an end waits for the last look at the JVM, which may not answer."""


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
        self._memory = MemoryMonitor(config.memory_backpressure, config.memory_refresh_interval_ms / 1000)
        self._stop = Stop()
        # Sessions that are silent are not waited for once the run is to end.
        self._settings = replace(config.pg_connection.connect_settings(f"headwater_{config.id}"), interrupt=self._stop)
        self._round_stop = self._stop.part()
        """Of the round that was opened last: a slot that was lost ends a round, and another may begin."""
        self._lost: LineageLost | None = None
        self._ended = threading.Event()
        self._error: HeadwaterError | None = None
        self._thread: threading.Thread | None = None
        self._destination_started = False
        self._system_identifier = ""
        self._run_token = uuid.uuid4().hex
        self._lock = RunLock(
            PipelineLock(self._settings, config.id),
            store,
            self._run_token,
            seen=lambda position: self.progress.server_at(position.value),
        )
        self._table_states: TableStates | None = None

    @property
    def stopped(self) -> bool:
        return self._ended.is_set()

    def start(self) -> None:
        """Check everything, then start the workers. Raises with all findings at once if the source is not ready.

        A `shutdown` meanwhile ends it soon and without an error; `wait` returns at once then.
        """
        if self._thread is not None:
            raise HeadwaterError(
                f"pipeline {self.config.id} was started before",
                hint="Make a new Pipeline object for another run.",
            )
        show_values(self.config.show_values_in_errors)
        self._store.interrupt_with(self._stop)
        try:
            self._lock.acquire()
            with naming_limits("starting the pipeline"):
                self._memory.start()
                round = self._open()
        except BaseException as error:
            self._close()
            if isinstance(error, HeadwaterError) and self._stop.is_set() and not isinstance(error, PipelineLocked):
                log.info("stopped while starting: %s", error.summary)
                self._ended.set()
                return
            raise
        self._thread = threading.Thread(
            target=self._supervise, args=(round,), name=f"headwater-pipeline-{self.config.id}", daemon=True
        )
        try:
            with naming_limits("starting the pipeline"):
                self._thread.start()
        except HeadwaterError:
            self._close()
            raise

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

    def _open(self) -> Round:
        config, store = self.config, self._store
        guard = RunGuard(self._lock, self.progress, self._stop.part())
        self._round_stop = guard.stop
        settings = replace(self._settings, interrupt=guard.stop)
        with connect(settings) as connection:
            for finding in check_source(connection, config, store_in_source=store.is_in(self._settings)):
                log.warning("%s\ndetail: %s\nhint: %s", finding.message, finding.detail, finding.hint)
            server = server_facts(connection)
            store.start()
            self._lock.begin()
            store.load_table_states()
            store.load_table_schemas()
            store.load_destination_tables_metadata()
            table_states = TableStates(store, self.progress)
            lineage = SlotLineage(config.id, store, self._destination, table_states)
            source = Source.of(config, settings, server)
            new_decoder = decoders(config.batch, self._memory)
            # The look first: what changes between the two is then found by the next one.
            looks = CatalogLooks(config.publication_name)
            look = looks.look(connection)
            tables = [t for t in published_tables(connection, config.publication_name) if t.id in look.tables]
            self._start_destination(server, table_states)
            start = PipelineSlot(config, source, store, lineage, guard).open(connection)
            settle_states(connection, config.id, store, table_states, tables, look)
        look_at_destination(config, self._destination, table_states, guard)
        facilities = Facilities(
            config,
            source,
            store,
            self._destination,
            self._spark,
            table_states,
            lineage,
            new_decoder,
            self._memory,
            guard,
        )
        return Round(facilities, start, tables, looks, look, self._part_failed)

    def _start_destination(self, server: ServerFacts, table_states: TableStates) -> None:
        """Once a run, which belongs to one cluster."""
        system_identifier = server.system_identifier
        self._table_states = table_states
        if not self._destination_started:
            context = RunContext(
                self.config.id,
                system_identifier,
                source_rows_reader(self._settings),
                database_oid=server.database_oid,
                run_token=self._run_token,
                timeline=lambda: self._table_states.timeline if self._table_states is not None else None,
            )
            self._destination.start(context)
            self._destination_started = True
        elif self._lost is not None and self._system_identifier != system_identifier:
            raise self._lost
        self._system_identifier = system_identifier

    def _supervise(self, opened: Round) -> None:
        round: Round | None = opened
        closing = threading.Event()
        verifying = SideThread(
            "headwater-lock", self._verify_lock, lambda: closing.wait(VERIFY_SECONDS), closing, self._part_failed
        )
        watching = SideThread(
            "headwater-jvm", self._watch, lambda: closing.wait(VERIFY_SECONDS), closing, self._part_failed
        )
        verifying.start()
        watching.start()
        try:
            while round is not None:
                round.run(lambda: self._error)
                self._await_destination(round)
                round = self._open_again()
        except Exception as error:
            self._fail(_as_headwater(error))
        finally:
            try:
                closing.set()
                verifying.join()
                watching.join(_JVM_SECONDS)
                self._close()
            finally:
                self._ended.set()

    def _await_destination(self, round: Round) -> None:
        """Before another round: there is one call for a table at a time, and what lands late would undo the new copy."""
        while self._lost is not None and not self._stop.is_set() and round.in_destination:
            self.progress.waiting("the destination to leave the copies that were under way")
            self._stop.wait(_LEAVE_SECONDS)
        self.progress.waiting(None)

    def _open_again(self) -> Round | None:
        """After the slot was lost under a run that may make a new one: opening finds that out, and copies again."""
        if self._lost is None:
            return None

        def open_again() -> Round | None:
            if self._stop.is_set():
                return None
            self._lock.require(self._stop)
            return self._open()

        opened: list[Round | None] = []

        def work() -> None:
            try:
                opened.append(retrying("opening the slot again", open_again, progress=self.progress, pause=self._pause))
            except Exception as error:
                self._part_failed(error)

        thread = threading.Thread(target=work, name="headwater-open", daemon=True)
        start_when_possible(thread, self._stop)
        while not join_if_started(thread, _LEAVE_SECONDS):
            if self._stop.is_set():
                join_if_started(thread, LEAVE_SECONDS)
                break
        self._lost = None
        return opened[0] if opened else None

    def _pause(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _verify_lock(self) -> None:
        self._lock.verify()

    def _part_failed(self, error: Exception) -> None:
        self._fail(_as_headwater(error))

    def _watch(self) -> None:
        """Raise if the run may not go on."""
        if self._spark is not None and not jvm_alive(self._spark):
            raise jvm_lost(
                "lake commits that were under way may or may not have happened; a new start finds out by their watermarks"
            )

    def _fail(self, error: HeadwaterError) -> None:
        """The first error is the one that ended the run; whatever follows from it is only logged."""
        if meaning(error) is Meaning.STOPPING:
            self._stop.set()
            return
        recreates = self.config.invalidated_slot_behavior is InvalidatedSlotBehavior.RECREATE
        if isinstance(error, LineageLost) and recreates and self._lost is None and self._error is None:
            self._lost = error
            self._round_stop.set()
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
            self._end("the destination's shutdown", lambda: self._destination.shutdown())
        # The lock is released on every way out, whatever the store is like.
        aside("closing the store", lambda: self._store.close())
        self._end("stopping the memory monitor", self._memory.stop)
        aside("releasing the lock", self._lock.release)

    @staticmethod
    def _end(what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            log.warning("%s failed: %s", what, error)


def _as_headwater(error: Exception) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        return error
    if (limit := limit_reached(error, "running the pipeline")) is not None:
        return limit
    log.error("unexpected failure: %s\n%s", said_by(error), where_raised(error))
    return HeadwaterError(
        "the pipeline failed unexpectedly",
        detail=said_by(error),
        hint="This is a defect of Headwater; report it with the log. Starting again goes on where it was.",
    )
