"""Bytes from the server, cut into whole messages without a Python step per message.

`Inbox` is the one receive buffer of a connection. Ordinary messages leave it one at a time; runs of CopyData leave it
as a `Chunk`, found by a compiled loop. A chunk owns its memory: what has been handed out is never written to again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numba import njit

from headwater.errors import ProtocolError
from headwater.wire.letters import COPY_DATA, FRAME_HEADER
from headwater.wire.messages import KNOWN_TYPES, MAX_MESSAGE_BYTES, Message

Bytes = npt.NDArray[np.uint8]

MORE = 0
OTHER = 1
MALFORMED = 2

_SMALL_CAPACITY_BYTES = 64 << 10


@dataclass(slots=True)
class Chunk:
    """Whole CopyData messages, back to back, each with its header: byte 'd', int32 length, payload."""

    data: Bytes


class ByteSource(Protocol):
    """What an inbox fills itself from."""

    def receive_into(self, view: memoryview) -> int:
        """Fill `view` without waiting; 0 when there is nothing now. Raises ConnectionLost at the end."""
        ...


@njit("Tuple((int64, int64, int64))(uint8[::1], int64, int64)", cache=True, nogil=True)
def split(buffer: Any, start: Any, end: Any) -> tuple[int, int, int]:
    """Step through CopyData messages from `start`.

    Returns where the last whole one ends, why the walk stopped there (MORE, OTHER, MALFORMED), and how many bytes the
    message at that place takes in all, 0 while its header is not there yet.
    """
    position = start
    while position < end:
        if buffer[position] != COPY_DATA:
            return position, OTHER, 0
        if position + FRAME_HEADER > end:
            return position, MORE, 0
        length: Any = (
            (np.int64(buffer[position + 1]) << 24)
            | (np.int64(buffer[position + 2]) << 16)
            | (np.int64(buffer[position + 3]) << 8)
            | np.int64(buffer[position + 4])
        )
        if length < 4 or length > MAX_MESSAGE_BYTES:
            return position, MALFORMED, length
        if position + 1 + length > end:
            return position, MORE, length + 1
        position += length + 1
    return position, MORE, 0


class Inbox:
    """The receive buffer: [start, whole) are CopyData messages ready to leave, [whole, end) is not looked at yet."""

    __slots__ = (
        "_buffer",
        "_capacity",
        "_end",
        "_needed",
        "_reason",
        "_received",
        "_source",
        "_start",
        "_view",
        "_whole",
    )

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._capacity = _SMALL_CAPACITY_BYTES
        self._buffer: Bytes = np.empty(self._capacity, np.uint8)
        self._view = self._buffer.data
        self._start = 0
        self._whole = 0
        self._end = 0
        self._needed = 0
        self._reason = MORE
        self._received = 0

    def reserve(self, capacity_bytes: int) -> None:
        """Choose how much one chunk may hold, from the next buffer on."""
        self._capacity = max(capacity_bytes, _SMALL_CAPACITY_BYTES)
        self._renew(self._capacity)

    @property
    def whole_bytes(self) -> int:
        """How many bytes of whole CopyData messages are ready to be taken."""
        return self._whole - self._start

    @property
    def meets_other(self) -> bool:
        """Whether what follows the whole CopyData messages is a message of another kind."""
        return self._reason == OTHER

    @property
    def is_full(self) -> bool:
        """Whether the buffer cannot receive more, or cannot hold one more whole message: time to take a chunk, if there is
        one."""
        if self._end == len(self._buffer):
            return True
        return self._whole > self._start and self._needed > len(self._buffer) - self._whole

    def receive(self) -> int:
        """Receive once, without waiting. 0 when nothing has come."""
        if self.is_full:
            self._make_room()
        count = self._source.receive_into(self._view[self._end :])
        self._end += count
        self._received += count
        return count

    def split_copy_data(self) -> None:
        """Find the whole CopyData messages among what was received."""
        self._whole, self._reason, self._needed = split(self._buffer, self._whole, self._end)
        if self._reason == MALFORMED:
            raise ProtocolError(
                "CopyData message with an impossible length",
                offset=self._received - (self._end - self._whole),
                detail=f"length {self._needed} at byte {self._received - (self._end - self._whole)} of the connection",
            )

    def take_chunk(self) -> Chunk:
        """Hand out the whole CopyData messages, and their memory with them."""
        start, whole = self._start, self._whole
        size = whole - start
        if size * 2 >= len(self._buffer):
            # The chunk takes the buffer along; less than half would pin more memory than it holds, so it is copied.
            chunk = Chunk(self._buffer[start:whole])
            self._start = whole
            self._renew(max(self._capacity, self._begun()))
            return chunk
        chunk = Chunk(self._buffer[start:whole].copy())
        self._start = whole
        self._rewind_if_empty()
        return chunk

    @property
    def received(self) -> int:
        """How many bytes have come since the connection was made."""
        return self._received

    def message(self, allowed: Mapping[bytes, int] | None = None) -> Message | None:
        """The next message of any kind, or None while it is not whole. Not for use while a chunk is ready.

        `allowed` are the kinds that may come now and how long they may be: what is not is refused by its header, before any
        room is made for it.
        """
        start = self._start
        if start == self._end:
            return None
        kind = self._buffer[start]
        if int(kind) not in KNOWN_TYPES:
            raise ProtocolError(
                "message of an unknown kind",
                offset=self._received - (self._end - start),
                detail=f"byte {int(kind):#04x} at byte {self._received - (self._end - start)} of the connection",
            )
        if start + 5 > self._end:
            return None
        length = int.from_bytes(self._view[start + 1 : start + 5], "big")
        if length < 4 or length > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                "message with an impossible length",
                offset=self._received - (self._end - start),
                detail=f"length {length} at byte {self._received - (self._end - start)} of the connection",
            )
        if allowed is not None:
            self._check_allowed(bytes(self._view[start : start + 1]), length, allowed)
        end = start + 1 + length
        if end > self._end:
            self._needed = length + 1
            return None
        message = Message(bytes(self._view[start : start + 1]), bytes(self._view[start + 5 : end]))
        self._start = self._whole = end
        self._needed = 0
        self._reason = MORE
        self._rewind_if_empty()
        return message

    def _check_allowed(self, kind: bytes, length: int, allowed: Mapping[bytes, int]) -> None:
        if kind not in allowed:
            raise ProtocolError(f"unexpected message {kind!r} while the session starts")
        if length > allowed[kind]:
            raise ProtocolError(
                f"message {kind!r} is too long while the session starts",
                detail=f"it announces {length} bytes, and at most {allowed[kind]} are expected",
                hint="Check that host and port are those of a Postgres server.",
            )

    def _rewind_if_empty(self) -> None:
        if self._start == self._end:
            self._start = self._whole = self._end = 0

    def _begun(self) -> int:
        """Room for the message that has begun, as far as it has come: a header alone may announce 1 GiB and bring nothing."""
        return min(self._needed, 4 * (self._end - self._whole))

    def _make_room(self) -> None:
        """Called with the buffer full, or with a message that cannot fit behind what stands before it."""
        size = max(self._capacity, self._begun() + self._whole - self._start)
        if self._start > 0 and size <= len(self._buffer):
            kept = self._end - self._start
            self._buffer[:kept] = self._buffer[self._start : self._end].copy()
            self._whole -= self._start
            self._start, self._end = 0, kept
        if self._end == len(self._buffer) or size > len(self._buffer):
            self._renew(max(size, 2 * (self._end - self._start)))

    def _renew(self, size: int) -> None:
        kept = self._end - self._start
        buffer: Bytes = np.empty(max(size, kept), np.uint8)
        buffer[:kept] = self._buffer[self._start : self._end]
        self._buffer = buffer
        self._view = buffer.data
        self._whole -= self._start
        self._start, self._end = 0, kept
