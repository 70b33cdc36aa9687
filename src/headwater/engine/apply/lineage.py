"""May this run go on with the server that it finds? Asked at the start, and again whenever the source answers as another server.

Everything that lies in the lake or on record counts (invariant 10): a position of another cluster, or of a timeline that
was left before it, is no position here.
"""

from __future__ import annotations

import logging

from headwater.contracts.destination import Destination
from headwater.contracts.stores import APPLY, Lineage, PipelineStore
from headwater.engine.hand_off import start_position
from headwater.engine.table_states import TableStates
from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.source.server import flush_lsn, server_facts
from headwater.source.session import Connection
from headwater.source.slot_check import SlotVerdict, check_apply_slot
from headwater.source.slots import apply_slot_name, inspect_slot
from headwater.source.timeline import ServerHistory, current_timeline, server_history
from headwater.states import AFTER_CRASH, Phase
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings

log = logging.getLogger(__name__)


class SlotLineage:
    """What is on record of the pipeline's slot, held against the slot and the server as they are."""

    def __init__(
        self, pipeline_id: int, store: PipelineStore, destination: Destination, table_states: TableStates
    ) -> None:
        self.slot_name = apply_slot_name(pipeline_id)
        self._store = store
        self._destination = destination
        self._table_states = table_states

    @property
    def recorded(self) -> Lineage | None:
        return self._store.get_lineage()

    def verdict(self, connection: Connection, history: ServerHistory) -> SlotVerdict:
        """Whether to make the pipeline's slot or to go on with it; a SlotError for everything else."""
        going_on = [table for table, state in self._store.get_table_states().items() if _goes_on(state.phase)]
        recorded = self.recorded
        if recorded is None:
            # Recorded by a version that knew no timelines: the watermarks name the cluster.
            metadata = (self._store.get_destination_table_metadata(table) for table in going_on)
            systems = [
                known.watermark.system_identifier
                for known in metadata
                if known is not None and known.watermark is not None
            ]
            recorded = Lineage(systems[0], history.timeline) if systems else None
        return check_apply_slot(
            inspect_slot(connection, self.slot_name),
            self._furthest_position(going_on),
            server_facts(connection),
            flush_lsn(connection),
            history,
            recorded,
        )

    def _furthest_position(self, tables: list[TableId]) -> EndLsn | None:
        """Of what is on record and of what the destination itself has: a slot younger than that would leave a gap, and a store
        in the source goes back with it."""
        seen = [self._store.get_replication_progress(APPLY), self._destination.furthest_position(tables)]
        for table in tables:
            state = self._store.get_table_state(table)
            if state is not None and state.phase is Phase.SYNC_DONE:
                seen.append(state.lsn)
            metadata = self._store.get_destination_table_metadata(table)
            if metadata is not None and metadata.watermark is not None:
                seen.append(metadata.watermark.position)
        return max((position for position in seen if position is not None), default=None)

    def position(self, connection: Connection) -> EndLsn:
        """Where to follow the slot from."""
        facts = inspect_slot(connection, self.slot_name)
        position = start_position(facts.confirmed_flush, self._store.get_replication_progress(APPLY))
        assert position is not None
        return position

    def record(self, history: ServerHistory) -> None:
        """Before a position of it is recorded or confirmed."""
        self._table_states.timeline = history.timeline
        before = self.recorded
        if before == history.lineage:
            return
        if before is not None:
            log.warning("the source is on timeline %d now, before it was %d", history.timeline, before.timeline)
        self._store.record_lineage(history.lineage)


def _goes_on(phase: Phase) -> bool:
    """What is copied again relies on nothing that it has seen."""
    return AFTER_CRASH[phase] is not Phase.INIT


class StandbyTimeline:
    """A standby may be promoted, or follow another primary, without ending the stream that it serves.

    So the timeline is asked for before a position is recorded or confirmed: one of a new timeline that stood on record
    under the old one would look like one that was lost. On a session of its own, since the stream's is busy.
    """

    def __init__(self, settings: ConnectSettings, lineage: SlotLineage) -> None:
        self._settings = settings
        self._lineage = lineage
        self._connection: WireConnection | None = None
        self._timeline: int | None = None

    def follow(self) -> None:
        try:
            if self._connection is None:
                self._connection = WireConnection.connect(self._settings, replication=True)
            if current_timeline(self._connection) == self._timeline:
                return
            history = server_history(self._connection)
        except BaseException:
            self.close()
            raise
        self._lineage.record(history)
        self._timeline = history.timeline

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
