"""What a run finds when it opens: its slot, its progress, and the states that an earlier run left."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headwater.config.pipeline import InvalidatedSlotBehavior, PipelineConfig
from headwater.contracts.stores import APPLY, PipelineStore
from headwater.engine.apply.lineage import SlotLineage
from headwater.engine.copied_schemas import CopiedSchemas
from headwater.engine.follow.slot_watch import NO_LOCK, SlotWatch
from headwater.engine.run_guard import RunGuard
from headwater.engine.source import Source
from headwater.engine.table_states import TableStates
from headwater.limits import naming_limits
from headwater.lsn import EndLsn
from headwater.source.catalog_look import Look
from headwater.source.differences import differences, gone_leaves
from headwater.source.fingerprint import Fingerprint, from_text
from headwater.source.publication import PublishedTable
from headwater.source.session import Connection
from headwater.source.slot_check import SlotVerdict
from headwater.source.slot_errors import LineageLost, SlotBeingSynced, SlotInUse, StandbyBehind
from headwater.source.slots import (
    create_slot,
    drop_slot,
    end_reader,
    inspect_slot,
    make_failover,
    sync_slots,
)
from headwater.source.timeline import ServerHistory, server_history
from headwater.states import AFTER_CRASH, Phase, carried, to_be_copied
from headwater.wire.connection import WireConnection

log = logging.getLogger(__name__)

_PASSING = (SlotInUse, SlotBeingSynced, StandbyBehind)
_PASSES_WITHIN_SECONDS = 15.0
_LOOK_SECONDS = 0.25
_GOES_ON = (Phase.SYNC_DONE, Phase.READY)


class PipelineSlot:
    """The pipeline's slot when a run begins: created for a new pipeline, resumed, or found lost (invariant 10)."""

    def __init__(
        self, config: PipelineConfig, source: Source, store: PipelineStore, lineage: SlotLineage, guard: RunGuard
    ) -> None:
        self._config = config
        self._source = source
        self._store = store
        self._lineage = lineage
        self._guard = guard
        self._name = lineage.slot_name

    def open(self, admin: Connection) -> EndLsn:
        """Where the apply worker starts."""
        with WireConnection.connect(self._source.settings, replication=True) as connection:
            try:
                verdict, history = self._verdict_in_time(admin, connection)
            except LineageLost as error:
                if self._config.invalidated_slot_behavior is not InvalidatedSlotBehavior.RECREATE:
                    raise
                log.warning("copying every table again: %s", error)
                # States first: interrupted after any step, the next run copies everything.
                self._store.reset_table_states_for_resync()
                drop_slot(admin, self._name)
                verdict, history = SlotVerdict.CREATE, server_history(connection)
            self._lineage.record(history)
            if verdict is SlotVerdict.CREATE:
                return self._create(admin, connection)
            if self._config.failover_slot and not inspect_slot(admin, self._name).failover:
                make_failover(connection, self._name)
            return self._lineage.position(admin)

    def _verdict_in_time(self, admin: Connection, connection: WireConnection) -> tuple[SlotVerdict, ServerHistory]:
        """What passes by itself is waited for a little.

        We hold the pipeline's lock, so a session of ours that reads the slot is what a killed run left, or of a run that lost
        the lock: it is ended, and can confirm nothing any more. A standby that was just started, or is about to be promoted,
        needs a moment too.
        """
        deadline = time.monotonic() + _PASSES_WITHIN_SECONDS
        while True:
            history = server_history(connection)
            try:
                return self._lineage.verdict(admin, history), history
            except _PASSING as error:
                if time.monotonic() > deadline:
                    raise
                if isinstance(error, SlotInUse):
                    end_reader(admin, self._name, wait_seconds=_LOOK_SECONDS)
                self._guard.pause(_LOOK_SECONDS)

    def _create(self, admin: Connection, connection: WireConnection) -> EndLsn:
        with self._watched(admin, connection):
            start = create_slot(connection, self._name, failover=self._config.failover_slot)
        # Recorded at once: from now on a missing slot is a lost one.
        self._store.upsert_replication_progress(APPLY, start)
        log.info("made replication slot %s at %s", self._name, start)
        return start

    @contextmanager
    def _watched(self, admin: Connection, connection: WireConnection) -> Iterator[None]:
        made = threading.Event()
        application = self._source.settings.application_name
        watch = SlotWatch(
            self._source.server, self._guard.stop, "the pipeline", admin, NO_LOCK, application, connection
        )
        watcher = threading.Thread(target=watch.run, args=(made,), name=f"headwater-wait-{self._name}", daemon=True)
        with naming_limits(f"making replication slot {self._name}"):
            watcher.start()
        try:
            yield
        finally:
            made.set()
            watcher.join()


def settle_states(
    connection: Connection,
    pipeline_id: int,
    store: PipelineStore,
    table_states: TableStates,
    tables: Sequence[PublishedTable],
    look: Look,
) -> None:
    """Take in the published tables, each as a crash would leave it; let go of those that left; drop leftover slots."""
    published = {table.id: table for table in tables}
    schemas = CopiedSchemas(store, table_states)
    known = list(store.get_table_states())
    for table_id in known:
        if table_id not in published:
            schema = schemas.of(table_id)
            name = schema.name if schema is not None else table_id
            log.warning("table %s left the publication: its lake table is kept", name)
            store.delete_table_state(table_id)
    for slot in sync_slots(connection, pipeline_id):
        drop_slot(connection, slot.name)
    recorded = store.get_table_fingerprints()
    for table in tables:
        state, fingerprint = store.get_table_state(table.id), None
        if state is None and known:
            log.warning("table %s joined the publication while the pipeline was stopped: it is copied", table.name)
        if state is not None and AFTER_CRASH[state.phase] in _GOES_ON:
            fingerprint = from_text(recorded.get(table.id, ""))
            reason = _why_not(fingerprint, look.tables[table.id], look.since)
            if reason:
                log.warning("table %s is copied again: %s", table.name, reason)
                state, fingerprint = to_be_copied(state), None
                store.update_table_state(table.id, state)
        elif state is not None and AFTER_CRASH[state.phase] is not state.phase:
            state = carried(state, to_be_copied(state))
            store.update_table_state(table.id, state)
        table_states.load(table.id, table.name, state, fingerprint)


def _why_not(recorded: Fingerprint | None, now: Fingerprint, since: EndLsn) -> str:
    """Why a copy that an earlier run made is not to be relied on; empty if nothing speaks against it.

    What a TRUNCATE in the stream may explain waits for the stream.
    """
    if recorded is None:
        return (
            "it is not known what happened to it while the pipeline was stopped; "
            "no fingerprint of it is on record, because an earlier version or a store that keeps none recorded its state"
        )
    found = [*differences(recorded, now), *gone_leaves(recorded, now, since)]
    return "; ".join(d.reason for d in found) if any(d.storage is None for d in found) else ""
