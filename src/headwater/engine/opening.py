"""What a run finds when it opens: its slot, its progress, and the states that an earlier run left."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from headwater.config.pipeline import InvalidatedSlotBehavior
from headwater.contracts.stores import APPLY
from headwater.engine.run import Run
from headwater.engine.slot_watch import NO_LOCK, SlotWatch
from headwater.lsn import EndLsn
from headwater.schema.table import TableId, quote_identifier
from headwater.source.membership import Membership
from headwater.source.publication import PublishedTable
from headwater.source.server import flush_lsn
from headwater.source.session import Connection
from headwater.source.slot_check import SlotVerdict, check_apply_slot
from headwater.source.slot_errors import LineageLost, SlotInUse
from headwater.source.slots import apply_slot_name, drop_slot, inspect_slot, sync_slots
from headwater.states import AFTER_CRASH, Phase, TableState
from headwater.wire.connection import WireConnection

log = logging.getLogger(__name__)

_FREE_WITHIN_SECONDS = 15.0
_LOOK_SECONDS = 0.25


def open_slot(run: Run, connection: Connection) -> EndLsn:
    """Where the apply worker starts. Makes the slot for a new pipeline; never papers over one that was lost (invariant 10)."""
    name = apply_slot_name(run.config.id)
    try:
        verdict = _verdict_when_free(run, connection, name)
    except LineageLost as error:
        if run.config.invalidated_slot_behavior is not InvalidatedSlotBehavior.RECREATE:
            raise
        log.warning("copying every table again: %s", error)
        drop_slot(connection, name)
        run.store.reset_table_states_for_resync()
        verdict = SlotVerdict.CREATE
    if verdict is SlotVerdict.CREATE:
        return _create(run, connection, name)
    facts = inspect_slot(connection, name)
    progress = run.store.get_replication_progress(APPLY)
    positions = [position for position in (facts.confirmed_flush, progress) if position is not None]
    return max(positions)


def _verdict_when_free(run: Run, connection: Connection, name: str) -> SlotVerdict:
    """We hold the pipeline's lock, so whoever reads the slot is what a killed run left; the server lets it go soon."""
    deadline = time.monotonic() + _FREE_WITHIN_SECONDS
    while True:
        try:
            return _verdict(run, connection, name)
        except SlotInUse:
            if time.monotonic() > deadline:
                raise
            run.pause(_LOOK_SECONDS)


def _verdict(run: Run, connection: Connection, name: str) -> SlotVerdict:
    """With the furthest position on record: a slot younger than what a table has seen would leave a gap."""
    seen = [run.store.get_replication_progress(APPLY)]
    system_identifier = None
    for table, state in run.store.get_table_states().items():
        if AFTER_CRASH[state.phase] is Phase.INIT:
            continue  # copied again: nothing it has seen counts
        if state.phase is Phase.SYNC_DONE:
            seen.append(state.lsn)
        metadata = run.store.get_destination_table_metadata(table)
        if metadata is not None and metadata.watermark is not None:
            seen.append(EndLsn(metadata.watermark.commit_lsn.value))
            system_identifier = metadata.watermark.system_identifier
    positions = [position for position in seen if position is not None]
    return check_apply_slot(
        inspect_slot(connection, name),
        max(positions) if positions else None,
        run.server,
        flush_lsn(connection),
        recorded_system_identifier=system_identifier,
    )


def _create(run: Run, admin: Connection, name: str) -> EndLsn:
    with WireConnection.connect(run.settings, replication=True) as connection:
        made = threading.Event()
        watch = SlotWatch(run, "the pipeline", admin, NO_LOCK, run.settings.application_name, connection)
        watcher = threading.Thread(target=watch.run, args=(made,), name=f"headwater-wait-{name}", daemon=True)
        watcher.start()
        try:
            row = connection.query(f"CREATE_REPLICATION_SLOT {quote_identifier(name)} LOGICAL pgoutput")[0]
        finally:
            made.set()
            watcher.join()
    point = row["consistent_point"]
    assert point is not None
    start = EndLsn.parse(point)
    # Recorded at once: from now on a missing slot is a lost one.
    run.store.upsert_replication_progress(APPLY, start)
    log.info("made replication slot %s at %s", name, start)
    return start


def settle_states(
    run: Run, connection: Connection, tables: Sequence[PublishedTable], members: Mapping[TableId, Membership]
) -> None:
    """Take in the published tables, each as a crash would leave it; let go of those that left; drop leftover slots."""
    published = {table.id: table for table in tables}
    for table_id in list(run.store.get_table_states()):
        if table_id not in published:
            log.info("table %s is no longer published: letting it go, its lake table is kept", table_id)
            run.store.delete_table_state(table_id)
    for slot in sync_slots(connection, run.config.id):
        drop_slot(connection, slot.name)
    for table in tables:
        # One that joined after the members were read has none yet; the first look finds its ties new and copies again.
        member = members.get(table.id)
        state = run.store.get_table_state(table.id)
        if state is not None and member is not None and _left_meanwhile(state, member):
            log.warning("table %s: not all of its changes were published meanwhile, copying it again", table.name)
            state = TableState(Phase.INIT)
            run.store.update_table_state(table.id, state)
        if state is not None and AFTER_CRASH[state.phase] is not state.phase:
            state = TableState(AFTER_CRASH[state.phase])
            run.store.update_table_state(table.id, state)
        run.board.load(table.id, table.name, state, str(member) if member is not None else "")


def _left_meanwhile(state: TableState, member: Membership) -> bool:
    """Whether the table was copied under another membership: it left and came back, or its terms changed."""
    return state.phase is not Phase.INIT and state.membership != "" and not member.continues(state.membership)
