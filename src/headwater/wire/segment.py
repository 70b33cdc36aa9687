"""The raw bytes of a part of a stream, with the list of messages found in them, as growing arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.errors import ProtocolError
from headwater.wire import kernels as k
from headwater.wire.changes import Transactions
from headwater.wire.columns import Bytes


def _grown(array: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    larger = np.empty(capacity, array.dtype)
    larger[: len(array)] = array
    return larger


class TransactionLog:
    """The transactions of the batch being collected, one array element each; the last may still be open."""

    def __init__(self) -> None:
        self.commit = np.empty(64, np.uint64)
        self.end = np.empty(64, np.uint64)
        self.time = np.empty(64, np.int64)
        self.xid = np.empty(64, np.uint32)
        self.begin_position = np.empty(64, np.int64)
        self.commit_position = np.empty(64, np.int64)

    def grow(self) -> None:
        capacity = 2 * len(self.commit)
        for name, array in list(vars(self).items()):
            setattr(self, name, _grown(array, capacity))

    def head(self, count: int) -> Transactions:
        return Transactions(
            self.commit[:count].copy(),
            self.end[:count].copy(),
            self.time[:count].copy(),
            self.xid[:count].copy(),
            self.begin_position[:count].copy(),
            self.commit_position[:count].copy(),
        )


class Segment:
    """Bytes and the messages in them. `first_position` numbers its first message within the batch."""

    def __init__(self, first_position: int, data: Bytes | None = None) -> None:
        """`data` is the memory to fill, where it is not to be ordinary memory; it has to be large enough."""
        self.first_position = first_position
        self.data: Bytes = data if data is not None else np.empty(1 << 16, np.uint8)
        self.used = 0
        self.commit_end = 0
        self.kind = np.empty(1024, np.uint8)
        self.off = np.empty(1024, np.int64)
        self.end = np.empty(1024, np.int64)
        self.relid = np.empty(1024, np.int64)
        self.tx = np.empty(1024, np.int64)
        self._consumed = 0
        self._count = 0

    def append(self, data: Bytes) -> None:
        needed = self.used + len(data)
        if needed > len(self.data):
            self.data = _grown(self.data, max(needed, 2 * len(self.data)))
        self.data[self.used : needed] = data
        self.used = needed

    def scan(self, state: npt.NDArray[np.int64], log: TransactionLog) -> int:
        """List the messages of the bytes appended since the last call; returns how many."""
        before = self._count
        state[k.CONSUMED], state[k.COUNT] = self._consumed, self._count
        while True:
            status = k.scan(
                self.data,
                self.used,
                state,
                self.kind,
                self.off,
                self.end,
                self.relid,
                self.tx,
                log.commit,
                log.end,
                log.time,
                log.xid,
                log.begin_position,
                log.commit_position,
                self.first_position,
            )
            if status == k.OK:
                break
            if status == k.MALFORMED:
                raise ProtocolError(k.ERRORS[int(state[k.ERROR])], offset=int(state[k.ERROR_OFFSET]))
            if int(state[k.TX_COUNT]) >= len(log.commit):
                log.grow()
            else:
                self._grow_messages()
        self._consumed, self._count = int(state[k.CONSUMED]), int(state[k.COUNT])
        return self._count - before

    def count_until(self, limit: int) -> int:
        """How many messages end at or before a byte."""
        return int(np.searchsorted(self.end[: self._count], limit, side="right"))

    def _grow_messages(self) -> None:
        capacity = 2 * len(self.kind)
        for name in ("kind", "off", "end", "relid", "tx"):
            setattr(self, name, _grown(getattr(self, name), capacity))
