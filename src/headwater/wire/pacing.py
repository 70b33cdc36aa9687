"""When to read: the nap that lets the kernel merge small sends.

A walsender sends every change with one system call. A reader that drains each at once wakes for each, and makes each
cost the sender 10 microseconds of CPU; left alone for some milliseconds the kernel merges them, at 4.4. But a single
change after a quiet time must not wait for others that never come. So: nap only while data keeps coming in small
reads.
"""

from __future__ import annotations

import time

from headwater.wire.transport import Transport

_LONGEST_NAP_SECONDS = 0.010
# Reads further apart than this are not a flow.
_FLOW_GAP_SECONDS = 0.005
# BEGIN, RELATION, a row and COMMIT of one small transaction may come as four reads; that is no flow yet.
_FLOW_READS = 4
# What is worth a turn of the reader; a read that brought this much needs no nap, and a nap that did is long enough.
_ENOUGH_BYTES = 512 << 10


class Pacing:
    """Watches how data comes in, and naps when that would pay."""

    __slots__ = ("_flow_reads", "_last_data_at", "_transport")

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._last_data_at = 0.0
        self._flow_reads = 0

    def arrived(self, count: int) -> None:
        """`count` bytes came; 0 when a nap brought nothing, which ends the flow."""
        now = time.monotonic()
        flowing = count > 0 and now - self._last_data_at < _FLOW_GAP_SECONDS
        self._flow_reads = 0 if not flowing else self._flow_reads + 1
        self._last_data_at = now

    def wants_nap(self, count: int) -> bool:
        """Whether a nap is worth while after a read that brought `count` bytes."""
        return self._flow_reads >= _FLOW_READS and count < _ENOUGH_BYTES

    def nap(self, at_most_seconds: float = _LONGEST_NAP_SECONDS) -> None:
        self._transport.nap_while_filling(min(_LONGEST_NAP_SECONDS, at_most_seconds), _ENOUGH_BYTES)
        # The time asleep is no pause of the sender's.
        self._last_data_at = time.monotonic()
