"""Transactions that are sent while still in progress (pgoutput's protocol 2): their bytes, kept apart until they commit.

The server sends a large transaction in blocks, with whole other transactions in between. A subtransaction that is rolled
back takes everything with it that came since it began.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from headwater.errors import ProtocolError
from headwater.wire.columns import Bytes
from headwater.wire.letters import STREAM_ABORT, STREAM_COMMIT, STREAM_START, STREAM_STOP
from headwater.wire.segment import Segment, StreamCommit, TransactionLog

_PAYLOAD = 30
"""Where a message lies in its CopyData frame, behind XLogData's header."""

IN_MEMORY_BYTES = 8 << 20
"""So much of one transaction may come before it is asked again whether there is room in memory: many may be in progress."""

NewSegment = Callable[[int, Sequence[Segment]], Segment]
"""Makes an empty segment with room for so many bytes, after those there are."""


class StreamedTransaction:
    """What has come of one transaction in progress."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def append(self, data: Bytes, state: npt.NDArray[np.int64], log: TransactionLog, make: NewSegment) -> None:
        if not self.segments or not self.segments[-1].has_room(len(data), IN_MEMORY_BYTES):
            self.segments.append(make(len(data), self.segments))
        segment = self.segments[-1]
        segment.append(data)
        segment.scan(state, log)

    def drop_from(self, xid: int) -> None:
        """A subtransaction was rolled back. Whatever came since it began is its own or of one within it, and those got
        their xids later: so the tail of messages at or past its xid goes."""
        while self.segments and self.segments[-1].drop_from(xid):
            self.segments.pop()


class StreamedTransactions:
    """All transactions of a connection that are in progress, by their xid, and the block that is being received."""

    def __init__(self) -> None:
        self._open: dict[int, StreamedTransaction] = {}
        self.block: StreamedTransaction | None = None
        """The transaction whose block is being received; its messages are not the stream's own."""

    @property
    def segments(self) -> list[Segment]:
        return [segment for transaction in self._open.values() for segment in transaction.segments]

    def control(self, data: Bytes, at: int) -> tuple[int, StreamCommit | None, StreamedTransaction | None]:
        """Take the message in the frame at a byte: where the next frame begins, and the transaction if it commits."""
        (size,) = struct.unpack("!I", data[at + 1 : at + 5].tobytes())
        message, stop = data[at + _PAYLOAD : at + 1 + size].tobytes(), at + 1 + size
        kind = message[0]
        if (self.block is not None) != (kind == STREAM_STOP):
            where = "inside a block" if self.block is not None else "outside a block"
            raise ProtocolError(f"{_NAMES[kind]} {where} of a transaction in progress", offset=at + _PAYLOAD)
        try:
            return stop, *self._take(kind, message, at + _PAYLOAD)
        except struct.error:
            raise ProtocolError(f"{_NAMES[kind]} is too short", offset=at + _PAYLOAD) from None

    def _take(self, kind: int, message: bytes, offset: int) -> tuple[StreamCommit | None, StreamedTransaction | None]:
        if kind == STREAM_START:
            (xid,) = struct.unpack_from("!I", message, 1)
            self.block = self._open.setdefault(xid, StreamedTransaction())
        elif kind == STREAM_STOP:
            self.block = None
        elif kind == STREAM_ABORT:
            xid, aborted = struct.unpack_from("!II", message, 1)
            if aborted == xid:
                self._open.pop(xid, None)
            elif xid in self._open:
                self._open[xid].drop_from(aborted)
        else:
            xid, _, commit_lsn, end_lsn, time_us = struct.unpack_from("!IBQQq", message, 1)
            transaction = self._open.pop(xid, None)
            if transaction is None:
                raise ProtocolError(f"{_NAMES[kind]} of a transaction that was never begun", offset=offset)
            return StreamCommit(xid, commit_lsn, end_lsn, time_us), transaction
        return None, None


_NAMES = {
    STREAM_START: "STREAM START",
    STREAM_STOP: "STREAM STOP",
    STREAM_COMMIT: "STREAM COMMIT",
    STREAM_ABORT: "STREAM ABORT",
}
