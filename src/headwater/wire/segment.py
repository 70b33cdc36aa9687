"""The raw bytes of a part of a stream, with the list of messages found in them, as growing arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.changes import Transactions
from headwater.errors import ProtocolError
from headwater.wire import kernels as k
from headwater.wire.columns import Bytes
from headwater.wire.spool import DiskBuffer, Spool

_LISTS = ("off", "end", "relid", "tx", "kind")


def _grown(array: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    larger = np.empty(capacity, array.dtype)
    larger[: len(array)] = array
    return larger


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """The end of a transaction that was sent while in progress."""

    xid: int
    commit_lsn: int
    end_lsn: int
    time_us: int


class TransactionLog:
    """The transactions of the batch being collected, one array element each; the last may still be open."""

    def __init__(self) -> None:
        self.commit = np.empty(64, np.uint64)
        self.end = np.empty(64, np.uint64)
        self.time = np.empty(64, np.int64)
        self.xid = np.empty(64, np.uint32)
        self.begin_position = np.empty(64, np.int64)
        self.commit_position = np.empty(64, np.int64)

    def add(self, index: int, transaction: StreamCommit, begin_position: int, commit_position: int) -> None:
        """Write a whole transaction at an index, which is the next free one."""
        if index >= len(self.commit):
            self.grow()
        self.commit[index], self.end[index] = transaction.commit_lsn, transaction.end_lsn
        self.time[index], self.xid[index] = transaction.time_us, transaction.xid
        self.begin_position[index], self.commit_position[index] = begin_position, commit_position

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
    """Bytes and the messages in them. `first_position` numbers its first message within the batch.

    One of a transaction in progress (`in_block`) has xids in the place of transactions' indexes until that commits.
    """

    def __init__(self, first_position: int, disk: DiskBuffer | None = None, *, in_block: bool = False) -> None:
        """`disk` is what to fill where it is not to be ordinary memory; it has to be large enough."""
        self.first_position = first_position
        self._disk = disk
        self._lists: DiskBuffer | None = None
        self._in_block = in_block
        self.data: Bytes = disk.data if disk is not None else np.empty(1 << 16, np.uint8)
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
                int(self._in_block),
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
        if not self._count:
            # Keepalives alone: an idle stream must not grow.
            self.used = self._consumed = 0
        return self._count - before

    @property
    def count(self) -> int:
        return self._count

    @property
    def on_disk(self) -> bool:
        return self._disk is not None

    @property
    def memory_bytes(self) -> int:
        return 0 if self.on_disk else len(self.data)

    def let_go(self) -> None:
        """It is not read for a while: pages of it that are on disk need not stay in memory."""
        if self._disk is not None:
            self._disk.let_go()
        if self._lists is not None:
            self._lists.let_go()

    def close(self, spool: Spool) -> None:
        """Nothing more is appended. The list of messages, about a third of small rows' size, goes to disk as well."""
        if self._disk is None or self._lists is not None:
            return
        arrays = [getattr(self, name)[: self._count] for name in _LISTS]
        self._lists = spool.buffer(max(sum(array.nbytes for array in arrays), 1))
        at = 0
        # The widest first, so that each lies where its type wants it.
        for name, array in zip(_LISTS, arrays, strict=True):
            there = self._lists.data[at : at + array.nbytes].view(array.dtype)
            there[:] = array
            setattr(self, name, there)
            at += array.nbytes
        self.let_go()

    def has_room(self, size: int, most: int) -> bool:
        """Whether so many bytes more fit: what lies on disk has its size from the beginning."""
        if self._disk is not None:
            return self.used + size <= len(self._disk.data)
        return self.used + size <= max(most, size)

    def drop_from(self, xid: int) -> bool:
        """Forget the tail of messages at or past an xid; whether nothing is left."""
        self._count = int(k.tail_of(self.tx, self._count, xid))
        self.used = self._consumed = int(self.end[self._count - 1]) if self._count else 0
        return not self._count

    def belongs_to(self, transaction: int, first_position: int) -> None:
        """Its transaction has committed: all of it is one index, and stands at this place of the batch."""
        self.tx[: self._count] = transaction
        self.first_position = first_position
        self.commit_end = self.used

    def count_until(self, limit: int) -> int:
        """How many messages end at or before a byte."""
        return int(np.searchsorted(self.end[: self._count], limit, side="right"))

    def _grow_messages(self) -> None:
        capacity = max(1024, 2 * len(self.kind))
        self._lists = None
        for name in _LISTS:
            setattr(self, name, _grown(getattr(self, name), capacity))
