"""A table sync worker's slot, followed through the loss of its connection: a copy that is whole outlives it.

The slot keeps what was not confirmed, so a new connection goes on from there. Only a slot that is gone, or a server that is
another one, makes the copy worthless.
"""

from __future__ import annotations

from headwater.engine.follow.slot_stream import SilenceLimit, SlotStream, StreamOptions
from headwater.engine.run import Run
from headwater.engine.table_sync.slot import SyncSlot
from headwater.engine.wake_up import WakeUp
from headwater.errors import Retry, SlotError, StartAgain
from headwater.lsn import EndLsn
from headwater.source.server import flush_lsn
from headwater.source.session import Connection, connect
from headwater.source.slot_errors import standby_behind
from headwater.source.timeline import server_history
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings


class TimelineChangedMeanwhile(StartAgain):
    """The copy is of a server that the apply worker has left, or has not come to yet: their positions are not the same."""


class SlotLostMeanwhile(StartAgain):
    """What was committed since the copy cannot be had any more."""


class SyncStream:
    """Used by the worker's thread. The slot's first connection is this one's to close; `close` ends all."""

    def __init__(
        self, run: Run, slot: SyncSlot, settings: ConnectSettings, what: str, options: StreamOptions, wake_up: WakeUp
    ) -> None:
        self._run = run
        self._slot = slot
        self._settings = settings
        self._what = what
        self._options = options
        self._wake_up = wake_up
        self._admin: Connection | None = None
        self._stream: SlotStream | None = None
        self._silence = SilenceLimit()
        self.decoder = run.decoder()
        self.confirmed = slot.start

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()

    def begin(self) -> None:
        """On the connection that the slot was made with. Nothing, if it has begun."""
        if self._stream is None:
            self._stream = self._start(self._slot.connection)

    def read(self) -> None:
        for chunk in self._open.take():
            self.decoder.feed(chunk.data)

    @property
    def dry(self) -> bool:
        return self._open.dry

    def confirm(self, position: EndLsn) -> None:
        """Everything before it is durable."""
        self.confirmed = position
        self._open.confirm(position)

    def request_reply(self) -> None:
        self._open.request_reply()

    @property
    def _open(self) -> SlotStream:
        assert self._stream is not None
        return self._stream

    def server_position(self) -> EndLsn:
        if self._admin is None:
            self._admin = connect(self._settings)
        return flush_lsn(self._admin)

    def connect_again(self) -> None:
        """Follow the slot from what is confirmed; what was read beyond that comes again."""
        self.close()
        self._run.require_lock()
        connection = WireConnection.connect(self._settings, replication=True)
        try:
            self._check(connection)
            self._stream = self._start(connection)
        except BaseException:
            connection.close()
            raise
        self.decoder = self._run.decoder()

    def _start(self, connection: WireConnection) -> SlotStream:
        try:
            options = self._silence.next(self.confirmed, self._options)
            leaves = self._run.lock.is_out_of_reach
            stream = SlotStream(connection, self._slot.name, self.confirmed, options, self._wake_up, leaves)
            return self._silence.begun(stream, self.confirmed)
        except SlotError as error:
            if error.retry is Retry.TIMED:
                raise
            raise SlotLostMeanwhile(
                f"the slot of the copy of {self._what} was lost",
                detail=error.message + (f": {error.detail}" if error.detail else ""),
                hint="Nothing is to be done: it is copied again at once.",
            ) from error

    def _check(self, connection: WireConnection) -> None:
        history = server_history(connection)
        self.check_timeline(history.timeline)
        same = history.system_identifier == self._run.server.system_identifier
        if same and history.flushed < self.confirmed and self._run.server.in_recovery:
            # One that was started again replays from further back; it comes to where it was by itself.
            raise standby_behind(self._slot.name, self.confirmed, history.flushed)
        if not same or history.flushed < self.confirmed:
            raise SlotLostMeanwhile(
                f"the server that {self._what} was copied from is not there any more",
                detail=f"its system identifier was {self._run.server.system_identifier} and its position {self.confirmed}, "
                f"now they are {history.system_identifier} and {history.flushed}",
                hint="Nothing is to be done: it is copied again at once.",
            )

    def check_timeline(self, followed: int | None) -> None:
        """Raise if changes are followed on another timeline than the copy is of; None if that is not known yet."""
        if followed is not None and followed != self._slot.timeline:
            raise TimelineChangedMeanwhile(
                f"the source changed its timeline during the copy of {self._what}",
                detail=f"the copy is of timeline {self._slot.timeline}, changes are followed on {followed}",
                hint="Nothing is to be done: it is copied again at once.",
            )
