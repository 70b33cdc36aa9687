"""A round: what works side by side from one opening of the slot until that slot is lost, or the run ends.

The apply worker, the table sync workers, the look at the catalog and the heartbeat, each with a thread of its own. The
supervising thread waits for no server: whatever asks one does so in another thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.config.pipeline import BatchConfig, PipelineConfig
from headwater.contracts.destination import Destination
from headwater.contracts.stores import PipelineStore
from headwater.engine.apply.lineage import SlotLineage
from headwater.engine.apply.publication_gap import PublicationGap
from headwater.engine.apply.record import ApplyRecord
from headwater.engine.apply.slot import ApplySlot
from headwater.engine.apply.worker import ApplyWorker
from headwater.engine.apply.write import BatchWriter
from headwater.engine.copied_schemas import CopiedSchemas
from headwater.engine.destination_calls import DestinationCalls
from headwater.engine.follow.follower import Follower
from headwater.engine.follow.ownership import ApplyOwnership
from headwater.engine.follow.stream_facts import StreamFacts
from headwater.engine.hand_off import ApplyHandOff, Positions
from headwater.engine.memory import MemoryMonitor, spool, stream_budget
from headwater.engine.retry import waits
from headwater.engine.run_guard import RunGuard
from headwater.engine.run_lock import VERIFY_SECONDS
from headwater.engine.source import Source
from headwater.engine.supervise.heartbeat import Heartbeat
from headwater.engine.supervise.publication_watch import PublicationWatch
from headwater.engine.supervise.side_thread import (
    LEAVE_SECONDS,
    SideThread,
    aside,
    join_if_started,
    start_when_possible,
)
from headwater.engine.table_states import TableStates
from headwater.engine.table_sync.copy_cores import CopyCores
from headwater.engine.table_sync.pool import TableSyncPool
from headwater.engine.table_sync.tables import SyncTables
from headwater.engine.table_sync.worker import TableSyncWorker
from headwater.engine.wake_up import WakeUp
from headwater.errors import HeadwaterError, SparkLost
from headwater.lsn import EndLsn
from headwater.source.catalog_look import CatalogLooks, Look
from headwater.source.publication import PublishedTable
from headwater.spark.copy_source import task_slots
from headwater.wire.pgoutput import PgOutputDecoder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

NewDecoder = Callable[[], PgOutputDecoder]
"""Makes a decoder for one connection."""

_LOOK_SECONDS = 0.25
_PATIENCE_SECONDS = 20.0
"""How long table sync workers may take to stop. One that waits for a lock of another session has nothing to finish."""
_AFTER_LOST_JVM_SECONDS = 2.0


@dataclass(frozen=True)
class Facilities:
    """What the parts of a round are made from."""

    config: PipelineConfig
    source: Source
    store: PipelineStore
    destination: Destination
    spark: SparkSession | None
    table_states: TableStates
    lineage: SlotLineage
    new_decoder: NewDecoder
    memory: MemoryMonitor
    guard: RunGuard


def decoders(config: BatchConfig, memory: MemoryMonitor) -> NewDecoder:
    """All streams together stay within the budget; what goes beyond it goes to disk. Raises if it cannot go there."""
    directory, budget = spool(config), stream_budget(config, memory)
    return lambda: PgOutputDecoder(directory, budget)


class Round:
    def __init__(
        self,
        facilities: Facilities,
        start: EndLsn,
        tables: Sequence[PublishedTable],
        looks: CatalogLooks,
        look: Look,
        failed: Callable[[Exception], None],
    ) -> None:
        """`start` is where the slot is followed from; `looks` have had the first `look`. `failed` is given what a part raises."""
        made, facts = facilities, StreamFacts()
        calls = DestinationCalls(made.destination, _seconds(made.config.destination_deadline_ms))
        self._guard = made.guard
        self._failed = failed
        self._worker = _apply_worker(made, start, calls, facts)
        make_worker = _worker_maker(made, calls)
        self._pool = TableSyncPool(
            made.config, made.source, made.store, made.table_states, made.guard, tables, make_worker, failed
        )
        self._watch = PublicationWatch(
            made.source, made.table_states, facts, made.guard.progress, self._pool, looks, look
        )
        self._heartbeat = Heartbeat(made.config.id, made.config.heartbeat_interval_ms, made.source.settings)

    @property
    def in_destination(self) -> bool:
        """Whether the destination is still at work for a table sync worker, also for one that has ended."""
        return self._pool.in_destination

    def stop(self) -> None:
        self._guard.stop.set()

    def run(self, error: Callable[[], HeadwaterError | None]) -> None:
        """Until the round is stopped. `error` is what has ended the run, if something has."""
        apply_thread = threading.Thread(target=self._apply, name="headwater-apply", daemon=True)
        sides = self._sides()
        start_when_possible(apply_thread, self._guard.stop)
        for side in sides:
            side.start()
        try:
            self._guard.stop.wait()
        finally:
            self.stop()
            self._worker.wake()
            self._pool.wake_up.notify()
            # After a lost JVM nothing of a write can end in order; the threads die with the process.
            most = _AFTER_LOST_JVM_SECONDS if isinstance(error(), SparkLost) else None
            join_if_started(apply_thread, most)
            ended = [side.join(LEAVE_SECONDS if most is None else most) for side in sides]
            self._pool.join(_PATIENCE_SECONDS if most is None else most)
            if all(ended):
                aside("the last look at the catalog", lambda: self._end_looks(error()))

    def _apply(self) -> None:
        try:
            self._worker.run()
        except Exception as error:
            self._failed(error)

    def _sides(self) -> list[SideThread]:
        stop, heartbeat = self._guard.stop, self._heartbeat

        def tend() -> None:
            self._watch.look_if_due()
            self._start_due()

        def pause() -> None:
            self._pool.wake_up.wait(_LOOK_SECONDS)

        def wait() -> None:
            stop.wait(_LOOK_SECONDS)

        return [
            SideThread("headwater-tables", tend, pause, stop, self._failed),
            SideThread("headwater-heartbeat", heartbeat.beat_if_due, wait, stop, self._failed, at_end=heartbeat.close),
        ]

    def _start_due(self) -> None:
        if not self._guard.lock.is_held:
            return
        try:
            self._pool.start_due()
        except HeadwaterError as error:
            if not waits(error):
                raise
            # Asked again soon: a store that is unreachable is no reason to end the run (invariant 15).
            log.warning("tables have to wait: %s", error.summary)
            self._guard.stop.wait(VERIFY_SECONDS)

    def _end_looks(self, error: HeadwaterError | None) -> None:
        # Without the lock nothing may be recorded, and the server does not answer.
        if error is None and self._guard.lock.is_held:
            self._watch.settle()
        self._watch.close()


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _apply_worker(made: Facilities, start: EndLsn, calls: DestinationCalls, facts: StreamFacts) -> ApplyWorker:
    config, states, guard, wake_up = made.config, made.table_states, made.guard, WakeUp()
    hand_off = ApplyHandOff(Positions.at(start))
    slot = ApplySlot(made.source, made.lineage, states, guard.lock, wake_up)
    record = ApplyRecord(config, made.store, states, slot, hand_off, guard)
    owner = ApplyOwnership(hand_off, states, CopiedSchemas(made.store, states))
    return ApplyWorker(
        config.batch,
        Follower(slot, owner, made.new_decoder, hand_off.positions),
        hand_off,
        slot,
        BatchWriter(config, calls, states, guard, wake_up),
        record,
        PublicationGap(made.source, made.lineage.slot_name, hand_off.positions, states, record, guard),
        states,
        facts,
        made.memory,
        guard,
        wake_up,
    )


def _worker_maker(
    made: Facilities, calls: DestinationCalls
) -> Callable[[Sequence[PublishedTable], str], TableSyncWorker]:
    config = made.config
    cores = CopyCores(task_slots(made.spark), config.max_copy_connections_per_table, config.max_table_sync_workers)

    def make(tables: Sequence[PublishedTable], slot_name: str) -> TableSyncWorker:
        guard = made.guard.part()
        return TableSyncWorker(
            config,
            made.source,
            made.store,
            calls,
            made.spark,
            made.new_decoder,
            made.table_states,
            SyncTables(config, tables, made.table_states, guard),
            cores,
            guard,
            slot_name,
        )

    return make
