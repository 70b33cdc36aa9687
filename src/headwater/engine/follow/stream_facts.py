"""What the apply worker's stream has shown so far: how far it has come, which tables were truncated.

The look at the catalog runs ahead of the stream, so a difference that the stream will explain waits until the stream has passed
the position of the look. Written by the apply worker's thread, read by the thread that looks at the catalog.
"""

from __future__ import annotations

import threading

from headwater.changes import StreamTruncate
from headwater.events import EventBatch
from headwater.lsn import ZERO, EndLsn
from headwater.schema.table import TableId
from headwater.source.differences import ToldTruncates

_KEPT = 1000
"""Truncates of a table between two fingerprints; the newest count."""


class StreamFacts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._position = ZERO
        self._wanted = ZERO
        self._truncates: dict[TableId, list[StreamTruncate]] = {}

    # The apply worker's side.

    def note(self, batch: EventBatch) -> None:
        """A batch was sealed."""
        with self._lock:
            for truncate in batch.truncates:
                kept = self._truncates.setdefault(truncate.table_id, [])
                kept.append(truncate)
                del kept[:-_KEPT]
            self._position = batch.end_lsn

    def passed(self, position: EndLsn) -> None:
        """Everything before it was decoded, also changes of other owners."""
        with self._lock:
            self._position = position

    @property
    def is_awaited(self) -> bool:
        """Whether a look waits for the stream: without traffic the server says how far it is only when asked."""
        with self._lock:
            return self._position < self._wanted

    # The look's side.

    def has_passed(self, position: EndLsn) -> bool:
        """Whether the stream has come as far; if not, it is asked for."""
        with self._lock:
            self._wanted = max(self._wanted, position)
            return self._position >= position

    def truncates(self, table_id: TableId) -> ToldTruncates:
        with self._lock:
            return ToldTruncates(frozenset(seen.xid for seen in self._truncates.get(table_id, ())))

    def forget_truncates(self, table_id: TableId, before: EndLsn) -> None:
        """A fingerprint that was taken at this position has seen them."""
        with self._lock:
            kept = [seen for seen in self._truncates.pop(table_id, ()) if seen.commit_lsn.at_or_past(before)]
            if kept:
                self._truncates[table_id] = kept
