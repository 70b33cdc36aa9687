"""The pipeline's own slot, on whatever server it is now: opened only where a position means what it meant (invariant 10)."""

from __future__ import annotations

from headwater.engine.apply.lineage import SlotLineage, StandbyTimeline
from headwater.engine.follow.slot_stream import SlotStream, SlotStreams
from headwater.engine.run_lock import RunLock
from headwater.engine.source import Source
from headwater.engine.table_states import TableStates
from headwater.engine.wake_up import WakeUp
from headwater.errors import Retry, SlotError
from headwater.lsn import EndLsn
from headwater.source.session import connect
from headwater.source.slot_errors import ahead_of_server, standby_behind
from headwater.source.timeline import ServerHistory, server_history
from headwater.wire.connection import WireConnection


class ApplySlot:
    """Used by the apply worker's thread. Streams are the caller's to close."""

    def __init__(
        self, source: Source, lineage: SlotLineage, table_states: TableStates, lock: RunLock, wake_up: WakeUp
    ) -> None:
        self._source = source
        self._lineage = lineage
        self._table_states = table_states
        self._settings = source.named(lineage.slot_name)
        self._streams = SlotStreams(source, lineage.slot_name, lock, wake_up, messages=source.messages)
        self._known = lineage.recorded
        self._standby = StandbyTimeline(source.settings, lineage) if source.server.in_recovery else None

    def close(self) -> None:
        if self._standby is not None:
            self._standby.close()

    def follow_timeline(self) -> None:
        """Before a position is recorded or confirmed: a standby may have come to another timeline under our session."""
        if self._standby is not None:
            self._standby.follow()

    def open(self, start: EndLsn, *, binary: bool) -> SlotStream:
        """A stream from `start`; on another timeline, from where that is now."""
        connection = WireConnection.connect(self._settings, replication=True)
        try:
            history = server_history(connection)
            stream = self._begin(connection, self._checked(history, start), binary)
        except BaseException:
            connection.close()
            raise
        # Only now: until a stream has begun at the position on record, the next attempt has to find that position again.
        self._known = history.lineage
        return stream

    def _checked(self, history: ServerHistory, start: EndLsn) -> EndLsn:
        """Where to begin. A server that is another one, or behind us, would skip what it commits up to our position."""
        if history.lineage == self._known:
            if history.flushed >= start:
                return start
            behind = ahead_of_server if self._standby is None else standby_behind
            raise behind(self._lineage.slot_name, start, history.flushed)
        with connect(self._source.settings) as admin:
            if self._known is not None:
                # First of all: what is handed over after the verdict has seen the states is to be of the new timeline.
                self._table_states.timeline = history.timeline
                self._lineage.verdict(admin, history)
                # What was confirmed beyond what is on record held no change of ours, and may not be there on a new timeline.
                start = self._lineage.position(admin)
            self._lineage.record(history)
        return start

    def _begin(self, connection: WireConnection, start: EndLsn, binary: bool) -> SlotStream:
        try:
            return self._streams.begin(connection, start, binary=binary)
        except SlotError as error:
            if error.retry is not Retry.TIMED:
                self._raise_why()
            raise

    def _raise_why(self) -> None:
        """The slot was lost while we were not connected: say in which of its ways, if the server tells."""
        with (
            WireConnection.connect(self._settings, replication=True) as other,
            connect(self._source.settings) as admin,
        ):
            self._lineage.verdict(admin, server_history(other))
