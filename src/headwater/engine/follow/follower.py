"""Following a slot: whole transactions, as they come, from a position on. What may be confirmed is said from outside.

The one way to follow a slot, for the apply worker and for table sync workers: stream, decoder, ownership, a new connection
after a lost one, and batches that are sealed. How far it is stands in `positions`. Used by one thread; the stream
has a thread of its own, which answers the server meanwhile (invariant 8).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from headwater.changes import StreamLeaf
from headwater.engine.follow.slot_stream import SlotStream
from headwater.engine.hand_off import Positions
from headwater.errors import HeadwaterError, ValueOutOfRange
from headwater.events import EventBatch
from headwater.lsn import CommitLsn, EndLsn
from headwater.schema.table import TableId
from headwater.wire.pgoutput import Answer, PgOutputDecoder
from headwater.wire.relation import RelationMessage

_ASK_SECONDS = 0.25


class Slot(Protocol):
    def open(self, start: EndLsn, *, binary: bool) -> SlotStream:
        """A stream that begins at `start`, or where the slot has to be followed from by now: see `SlotStream.start`."""
        ...


class Owner(Protocol):
    """Which changes are the follower's."""

    binary: bool
    """Whether the binary form of values is asked for."""

    def assign(self, relation: RelationMessage, commit_lsn: CommitLsn) -> Answer: ...

    def changed_by(self, leaves: Iterable[StreamLeaf]) -> set[TableId]:
        """The roots of leaves whose old tuples are not what the copy relies on."""
        ...


class Follower:
    def __init__(
        self, slot: Slot, owner: Owner, new_decoder: Callable[[], PgOutputDecoder], positions: Positions
    ) -> None:
        self.positions = positions
        self._slot = slot
        self._owner = owner
        self._new_decoder = new_decoder
        self._decoder = new_decoder()
        self._stream: SlotStream | None = None
        self._asked_at = 0.0

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    def connect(self) -> None:
        """Follow the slot from what is confirmed. Whatever was read beyond that comes again."""
        self._stream = self._slot.open(self.positions.confirmed, binary=self._owner.binary)
        self._decoder = self._new_decoder()
        self.positions.connected(self._stream.start)

    def use_text(self) -> None:
        """From the next connection on."""
        self._owner.binary = False

    def disconnect(self) -> None:
        """In order, so that what was confirmed last reaches the server."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    # What has come

    def read(self) -> None:
        """Take in what has come. Raises what ended the connection, after the last of it."""
        for chunk in self._open.take():
            self._decoder.feed(chunk.data)
        self.positions.received = max(self.positions.received, self._decoder.received_position)

    @property
    def dry(self) -> bool:
        """Nothing more has come yet."""
        return self._open.dry

    @property
    def has_transactions(self) -> bool:
        """Whether a batch can be sealed."""
        return self._decoder.has_transactions

    @property
    def waiting_bytes(self) -> int:
        """The size of what waits to be sealed."""
        return self._decoder.buffered_bytes if self._decoder.has_transactions else 0

    @property
    def idle_position(self) -> EndLsn | None:
        """The server's position, if nothing before it waits to be sealed."""
        return self._decoder.idle_position

    @property
    def whole_until(self) -> EndLsn:
        """Every transaction that ends at or before this was sealed or waits to be."""
        return self._decoder.whole_until

    # Batches

    def seal(self, fail: Callable[[TableId, HeadwaterError], None]) -> EventBatch | None:
        """A batch of all whole transactions that have come, or None. Its `changed` are tables that are not what was copied.

        A table with a value that cannot be decoded is given to `fail`, which takes the table from the owner or raises; the
        batch is then sealed without that table.
        """
        while True:
            try:
                batch = self._decoder.seal(self._owner.assign)
                break
            except ValueOutOfRange as error:
                if error.table_id is None:
                    raise
                fail(TableId(error.table_id), error)
        if batch is None:
            return None
        return replace(batch, changed=batch.changed | self._owner.changed_by(batch.leaves))

    def confirm(self, position: EndLsn) -> None:
        """Everything before it is durable, and on record."""
        if self._stream is not None:
            self._stream.confirm(position)

    def ask_position(self, *, at_once: bool = False) -> None:
        """Have the server say how far it is: without traffic it does so only when asked. Not often, unless `at_once`."""
        if self._stream is not None and (at_once or time.monotonic() - self._asked_at > _ASK_SECONDS):
            self._asked_at = time.monotonic()
            self._stream.request_reply()

    @property
    def _open(self) -> SlotStream:
        assert self._stream is not None
        return self._stream
