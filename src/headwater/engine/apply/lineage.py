"""May this run go on with the server it meets? Asked at the start, and again whenever the source answers as another one.

Everything that lies in the lake or on record counts (invariant 10): a position of another cluster, or of a timeline that
was left before it, is no position here.
"""

from __future__ import annotations

import logging

from headwater.contracts.stores import APPLY, Lineage
from headwater.engine.run import Run
from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.source.server import flush_lsn, server_facts
from headwater.source.session import Connection
from headwater.source.slot_check import SlotVerdict, check_apply_slot
from headwater.source.slots import apply_slot_name, inspect_slot
from headwater.source.timeline import ServerHistory, current_timeline, server_history
from headwater.states import AFTER_CRASH, Phase
from headwater.wire.connection import WireConnection

log = logging.getLogger(__name__)


def slot_verdict(run: Run, connection: Connection, history: ServerHistory) -> SlotVerdict:
    """Whether to make the pipeline's slot or to go on with it; a SlotError for everything else."""
    going_on = [table for table, state in run.store.get_table_states().items() if _goes_on(state.phase)]
    recorded = run.store.get_lineage()
    if recorded is None:
        # Recorded by a version that knew no timelines: the marks tell the cluster.
        marks = (run.store.get_destination_table_metadata(table) for table in going_on)
        systems = [
            mark.watermark.system_identifier for mark in marks if mark is not None and mark.watermark is not None
        ]
        recorded = Lineage(systems[0], history.timeline) if systems else None
    return check_apply_slot(
        inspect_slot(connection, apply_slot_name(run.config.id)),
        _furthest_position(run, going_on),
        server_facts(connection),
        flush_lsn(connection),
        history,
        recorded,
    )


def _goes_on(phase: Phase) -> bool:
    """What is copied again relies on nothing that it has seen."""
    return AFTER_CRASH[phase] is not Phase.INIT


def _furthest_position(run: Run, tables: list[TableId]) -> EndLsn | None:
    """Of what is on record and of what the destination itself has: a slot younger than that would leave a gap, and a store
    in the source goes back with it."""
    seen = [run.store.get_replication_progress(APPLY), run.destination.furthest_position(tables)]
    for table in tables:
        state = run.store.get_table_state(table)
        if state is not None and state.phase is Phase.SYNC_DONE:
            seen.append(state.lsn)
        metadata = run.store.get_destination_table_metadata(table)
        if metadata is not None and metadata.watermark is not None:
            seen.append(metadata.watermark.position)
    return max((position for position in seen if position is not None), default=None)


def slot_position(run: Run, connection: Connection) -> EndLsn:
    """Where to follow the slot from: what was confirmed, or recorded if that is further."""
    facts = inspect_slot(connection, apply_slot_name(run.config.id))
    positions = (facts.confirmed_flush, run.store.get_replication_progress(APPLY))
    return max(position for position in positions if position is not None)


def record_lineage(run: Run, history: ServerHistory) -> None:
    """Before a position of it is recorded or confirmed."""
    run.table_states.timeline = history.timeline
    before = run.store.get_lineage()
    if before == history.lineage:
        return
    if before is not None:
        log.warning("the source is on timeline %d now, before it was %d", history.timeline, before.timeline)
    run.store.record_lineage(history.lineage)


class StandbyTimeline:
    """A standby may be promoted, or follow another primary, without ending the stream that it serves.

    So the timeline is asked for before a position is recorded or confirmed: one of a new timeline that stood on record
    under the old one would look like one that was lost. On a session of its own, since the stream's is busy.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._connection: WireConnection | None = None
        self._timeline: int | None = None

    def follow(self) -> None:
        try:
            if self._connection is None:
                self._connection = WireConnection.connect(self._run.settings, replication=True)
            if current_timeline(self._connection) == self._timeline:
                return
            history = server_history(self._connection)
        except BaseException:
            self.close()
            raise
        record_lineage(self._run, history)
        self._timeline = history.timeline

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
