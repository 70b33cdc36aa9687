"""The pipeline's own slot, on whatever server it is now: opened only where a position means what it meant (invariant 10)."""

from __future__ import annotations

from dataclasses import replace

from headwater.engine.apply.lineage import StandbyTimeline, record_lineage, slot_position, slot_verdict
from headwater.engine.follow.slot_stream import SilenceLimit, SlotStream, StreamOptions
from headwater.engine.run import Run
from headwater.engine.wake_up import WakeUp
from headwater.errors import Retry, SlotError
from headwater.lsn import EndLsn
from headwater.source.session import connect
from headwater.source.slot_errors import ahead_of_server, standby_behind
from headwater.source.slots import apply_slot_name
from headwater.source.timeline import server_history
from headwater.wire.connection import WireConnection


class ApplySlot:
    """Used by the apply worker's thread. Streams are the caller's to close."""

    def __init__(self, run: Run, start: EndLsn, wake_up: WakeUp) -> None:
        self.confirmed = start
        """Everything before it is durable and recorded, or concerns nobody; on another timeline `open` finds it anew."""
        self._run = run
        self._wake_up = wake_up
        self._name = apply_slot_name(run.config.id)
        self._settings = replace(run.settings, application_name=self._name)
        self._lineage = run.store.get_lineage()
        self._silence = SilenceLimit()
        self._standby = StandbyTimeline(run) if run.server.in_recovery else None

    def close(self) -> None:
        if self._standby is not None:
            self._standby.close()

    def follow_timeline(self) -> None:
        """Before a position is recorded or confirmed: a standby may have come to another timeline under our session."""
        if self._standby is not None:
            self._standby.follow()

    def open(self, *, binary: bool) -> SlotStream:
        """A stream from what is confirmed."""
        config = self._run.config
        options = replace(self._run.stream_options(binary), messages=config.heartbeat_interval_ms is not None)
        connection = WireConnection.connect(self._settings, replication=True)
        try:
            self._check_lineage(connection)
            return self._start(connection, options)
        except BaseException:
            connection.close()
            raise

    def _check_lineage(self, connection: WireConnection) -> None:
        """A server that is another one, or behind us, would skip what it commits up to our position."""
        history = server_history(connection)
        if history.lineage == self._lineage:
            if history.flushed >= self.confirmed:
                return
            behind = ahead_of_server if self._standby is None else standby_behind
            raise behind(self._name, self.confirmed, history.flushed)
        with connect(self._run.settings) as admin:
            if self._lineage is not None:
                # First of all: what is handed over after the verdict has seen the states is to be of the new timeline.
                self._run.table_states.timeline = history.timeline
                slot_verdict(self._run, admin, history)
                # What we confirmed beyond what is on record held nothing for us, and may not be there on a new timeline.
                self.confirmed = slot_position(self._run, admin)
            record_lineage(self._run, history)
        self._lineage = history.lineage

    def _start(self, connection: WireConnection, options: StreamOptions) -> SlotStream:
        try:
            options = self._silence.next(self.confirmed, options)
            leaves = self._run.lock.is_out_of_reach
            stream = SlotStream(connection, self._name, self.confirmed, options, self._wake_up, leaves)
            return self._silence.begun(stream, self.confirmed)
        except SlotError as error:
            if error.retry is not Retry.TIMED:
                self._raise_why()
            raise

    def _raise_why(self) -> None:
        """The slot was lost while we were away: say in which of its ways, if the server tells."""
        with WireConnection.connect(self._settings, replication=True) as other, connect(self._run.settings) as admin:
            slot_verdict(self._run, admin, server_history(other))
