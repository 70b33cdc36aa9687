"""What a run finds when it opens: its slot, its progress, and the states that an earlier run left."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headwater.config.pipeline import InvalidatedSlotBehavior
from headwater.contracts.stores import APPLY
from headwater.engine.apply.lineage import record_lineage, slot_position, slot_verdict
from headwater.engine.follow.slot_watch import NO_LOCK, SlotWatch
from headwater.engine.run import Run
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
    apply_slot_name,
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


def open_slot(run: Run, admin: Connection) -> EndLsn:
    """Where the apply worker starts. Makes the slot for a new pipeline; never papers over one that was lost (invariant 10)."""
    name = apply_slot_name(run.config.id)
    with WireConnection.connect(run.settings, replication=True) as connection:
        try:
            verdict, history = _verdict_in_time(run, admin, connection)
        except LineageLost as error:
            if run.config.invalidated_slot_behavior is not InvalidatedSlotBehavior.RECREATE:
                raise
            log.warning("copying every table again: %s", error)
            # States first: interrupted after any step, the next run copies everything.
            run.store.reset_table_states_for_resync()
            drop_slot(admin, name)
            verdict, history = SlotVerdict.CREATE, server_history(connection)
        record_lineage(run, history)
        if verdict is SlotVerdict.CREATE:
            return _create(run, admin, connection, name)
        if run.config.failover_slot and not inspect_slot(admin, name).failover:
            make_failover(connection, name)
        return slot_position(run, admin)


def _verdict_in_time(run: Run, admin: Connection, connection: WireConnection) -> tuple[SlotVerdict, ServerHistory]:
    """What passes by itself is waited for a little.

    We hold the pipeline's lock, so a session of ours that reads the slot is what a killed run left, or of a run that lost
    the lock: it is ended, and can confirm nothing any more. A standby that was just started, or is about to be promoted,
    needs a moment too.
    """
    deadline = time.monotonic() + _PASSES_WITHIN_SECONDS
    while True:
        history = server_history(connection)
        try:
            return slot_verdict(run, admin, history), history
        except _PASSING as error:
            if time.monotonic() > deadline:
                raise
            if isinstance(error, SlotInUse):
                end_reader(admin, apply_slot_name(run.config.id), wait_seconds=_LOOK_SECONDS)
            run.pause(_LOOK_SECONDS)


def _create(run: Run, admin: Connection, connection: WireConnection, name: str) -> EndLsn:
    with _watched(run, admin, connection, name):
        start = create_slot(connection, name, failover=run.config.failover_slot)
    # Recorded at once: from now on a missing slot is a lost one.
    run.store.upsert_replication_progress(APPLY, start)
    log.info("made replication slot %s at %s", name, start)
    return start


@contextmanager
def _watched(run: Run, admin: Connection, connection: WireConnection, name: str) -> Iterator[None]:
    made = threading.Event()
    watch = SlotWatch(run, "the pipeline", admin, NO_LOCK, run.settings.application_name, connection)
    watcher = threading.Thread(target=watch.run, args=(made,), name=f"headwater-wait-{name}", daemon=True)
    with naming_limits(f"making replication slot {name}"):
        watcher.start()
    try:
        yield
    finally:
        made.set()
        watcher.join()


def settle_states(run: Run, connection: Connection, tables: Sequence[PublishedTable], look: Look) -> None:
    """Take in the published tables, each as a crash would leave it; let go of those that left; drop leftover slots."""
    published = {table.id: table for table in tables}
    known = list(run.store.get_table_states())
    for table_id in known:
        if table_id not in published:
            schema = run.stored_schema(table_id)
            name = schema.name if schema is not None else table_id
            log.warning("table %s left the publication: its lake table is kept", name)
            run.store.delete_table_state(table_id)
    for slot in sync_slots(connection, run.config.id):
        drop_slot(connection, slot.name)
    recorded = run.store.get_table_fingerprints()
    for table in tables:
        state, fingerprint = run.store.get_table_state(table.id), None
        if state is None and known:
            log.warning("table %s joined the publication while the pipeline was stopped: it is copied", table.name)
        if state is not None and AFTER_CRASH[state.phase] in _GOES_ON:
            fingerprint = from_text(recorded.get(table.id, ""))
            reason = _why_not(fingerprint, look.tables[table.id], look.since)
            if reason:
                log.warning("table %s is copied again: %s", table.name, reason)
                state, fingerprint = to_be_copied(state), None
                run.store.update_table_state(table.id, state)
        elif state is not None and AFTER_CRASH[state.phase] is not state.phase:
            state = carried(state, to_be_copied(state))
            run.store.update_table_state(table.id, state)
        run.table_states.load(table.id, table.name, state, fingerprint)


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
