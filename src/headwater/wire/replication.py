"""CopyBoth mode: changes come in as chunks, positions go out as status messages.

Invariants kept here: the server is never left unanswered (status goes out unasked, on time, from `read` and from
`tick`), and a position is reported as flushed only after a call of `confirm` with it, and never moves back.

In the other direction: a server that sends nothing for a while is asked for a reply, and one that does not reply counts as
unreachable, whatever its socket looks like. Any byte counts. Time in which this side did not read does not count as silence.

One thread owns the socket and calls `read`, `tick` and `stop`. Other threads only set a value and wake the owner: `confirm`,
`request_reply`, `wake`. OpenSSL objects must not be used by two threads at once, so everything is sent by the owner.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
from numba import njit

from headwater.changes import EPOCH_2000_SECONDS
from headwater.errors import ConnectionLost, HeadwaterError, ProtocolError
from headwater.lsn import ZERO, EndLsn
from headwater.wire import messages
from headwater.wire.chunks import Chunk
from headwater.wire.conversation import Conversation
from headwater.wire.letters import KEEPALIVE_SIZE, PRIMARY_KEEPALIVE, XLOG_DATA, XLOG_DATA_HEADER
from headwater.wire.messages import Message
from headwater.wire.pacing import Pacing

_log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0


@njit("Tuple((int64, int64, int64))(uint8[::1], int64)", cache=True, nogil=True)
def survey(data: Any, highest: Any) -> tuple[int, int, int]:
    """Over whole CopyData: the highest WAL end, whether a keepalive asks for a reply, the first bad offset or -1."""
    position: Any = 0
    asked = 0
    while position < len(data):
        length: Any = (
            (np.int64(data[position + 1]) << 24)
            | (np.int64(data[position + 2]) << 16)
            | (np.int64(data[position + 3]) << 8)
            | np.int64(data[position + 4])
        )
        end = position + 1 + length
        payload = position + 5
        size = end - payload
        if size >= XLOG_DATA_HEADER and data[payload] == XLOG_DATA:
            at = payload + 9
        elif size == KEEPALIVE_SIZE and data[payload] == PRIMARY_KEEPALIVE:
            at = payload + 1
            if data[payload + 17] != 0:
                asked = 1
        else:
            return highest, asked, position
        wal_end: Any = np.int64(0)
        for index in range(at, at + 8):
            wal_end = (wal_end << 8) | np.int64(data[index])
        highest = max(highest, wal_end)
        position = end
    return highest, asked, -1


class ReplicationStream:
    """One slot's changes. Made by `WireConnection.start_replication`."""

    def __init__(
        self,
        conversation: Conversation,
        slot: str,
        start: EndLsn,
        *,
        status_interval_seconds: float,
        silence_seconds: float,
        chunk_bytes: int,
    ) -> None:
        self._conversation = conversation
        self._transport = conversation.transport
        self._inbox = conversation.inbox
        self._slot = slot
        self._start = start
        self._interval_seconds = status_interval_seconds
        self._chunk_bytes = chunk_bytes
        self._pacing = Pacing(conversation.transport)
        self._received = 0
        self._ended = False
        # Used by the owner alone.
        self._reported = ZERO
        self._server_asked = False
        self._due_at = time.monotonic() + status_interval_seconds
        self._half_seconds = silence_seconds / 2
        self._silent_since = time.monotonic()
        self._asked_at: float | None = None
        """When a reply was asked for because of silence; None while there is none."""
        # Shared with other threads, under the lock.
        self._lock = threading.Lock()
        self._confirmed = ZERO
        self._reply_wanted = False
        self._woken = False

    @property
    def last_received(self) -> EndLsn:
        """The highest WAL end that came with a change or a keepalive."""
        return EndLsn(self._received)

    @property
    def confirmed(self) -> EndLsn:
        """What was, or is about to be, reported to the server as flushed; zero until the first `confirm`."""
        with self._lock:
            return self._confirmed

    def confirm(self, flushed: EndLsn) -> None:
        """Everything before `flushed` is durable and recorded; the server may remove its WAL. Any thread; sent at once."""
        with self._lock:
            # Below the start it would be a step back: servers before 18 take even that from a client.
            if not flushed > self._confirmed or flushed < self._start:
                return
            self._confirmed = flushed
        self._transport.wake()

    def request_reply(self) -> None:
        """Ask the server for a keepalive, which carries the server's position. Any thread; sent at once."""
        with self._lock:
            self._reply_wanted = True
        self._transport.wake()

    def wake(self) -> None:
        """Make a `read` in progress, or else the next one, return None early. Any thread."""
        with self._lock:
            self._woken = True
        self._transport.wake()

    def read(self, timeout_seconds: float) -> Chunk | None:
        """Whole messages, as many as are there, or None after `timeout_seconds` without any."""
        self._check_open()
        deadline = time.monotonic() + timeout_seconds
        inbox = self._inbox
        while True:
            lost = self._tick_or_lost()
            lost = self._receive(deadline) or lost
            # What came before the connection was lost is good, and the server's last message says more than "lost"; the next
            # read fails again.
            if inbox.whole_bytes:
                return self._take_chunk()
            if inbox.meets_other and self._take_other():
                continue
            if lost is not None:
                raise lost
            self._check_silence()
            with self._lock:
                woken, self._woken = self._woken, False
            remaining = deadline - time.monotonic()
            if woken or remaining <= 0:
                return None
            if not inbox.is_full:
                due_seconds = min(remaining, self._due_at - time.monotonic(), self._half_seconds / 4)
                self._transport.wait(max(0.0, due_seconds))

    def tick(self) -> None:
        """Send status if it is due or there is something new to report. For an owner that does not want to read just now."""
        self._hear()
        self._send_if_due()

    def _hear(self) -> None:
        self._silent_since, self._asked_at = time.monotonic(), None

    def _check_silence(self) -> None:
        """After a receive that brought nothing. Half the time for the reply, however late it was asked for: a process that was
        stopped for a while finds what came meanwhile first."""
        now = time.monotonic()
        if self._asked_at is None:
            if now - self._silent_since >= self._half_seconds:
                self._asked_at = now
                with self._lock:
                    self._reply_wanted = True
        elif now - self._asked_at >= self._half_seconds:
            self._ended = True
            self._conversation.close()
            error = self._conversation.silent(now - self._silent_since)
            _log.warning('replication slot "%s": %s', self._slot, error)
            raise error

    def _send_if_due(self) -> None:
        self._check_open()
        with self._lock:
            confirmed = self._confirmed
            ask, self._reply_wanted = self._reply_wanted, False
        now = time.monotonic()
        if not (ask or self._server_asked or confirmed > self._reported or now >= self._due_at):
            return
        written = EndLsn(max(self._received, confirmed.value))
        clock = int((time.time() - EPOCH_2000_SECONDS) * 1_000_000)
        self._transport.send(messages.standby_status(written, confirmed, clock, ask_reply=ask))
        self._reported = confirmed
        self._server_asked = False
        self._due_at = now + self._interval_seconds

    def stop(self) -> None:
        """End the stream. The connection takes commands again, or is closed if the server did not end in time.

        In the middle of a large transaction a walsender goes on sending before it listens; what comes is thrown away,
        unconfirmed, for at most some seconds.
        """
        if self._ended or self._conversation.closed:
            self._ended = True
            return
        try:
            self.tick()
            self._ended = True
            self._transport.send(messages.copy_done())
            if self._drain(time.monotonic() + _STOP_SECONDS):
                self._conversation.release()
                return
        except HeadwaterError:
            pass  # it has ended, though with an error: what was confirmed is confirmed, the rest comes again
        self._ended = True
        self._conversation.close()

    def _tick_or_lost(self) -> ConnectionLost | None:
        try:
            self._send_if_due()
        except ConnectionLost as error:
            if self._conversation.closed or self._ended:
                raise
            return error
        return None

    def _receive(self, deadline: float) -> ConnectionLost | None:
        """Take what is there until it is dry or the chunk is full, after a nap if data keeps trickling in."""
        inbox, pacing = self._inbox, self._pacing
        try:
            count = self._receive_until_dry()
            if count:
                pacing.arrived(count)
            if inbox.whole_bytes and pacing.wants_nap(inbox.whole_bytes) and not inbox.meets_other:
                remaining = deadline - time.monotonic()
                if remaining > 0:
                    pacing.nap(remaining)
                    pacing.arrived(self._receive_until_dry())
        except ConnectionLost as error:
            inbox.split_copy_data()
            return error
        return None

    def _receive_until_dry(self) -> int:
        inbox, total = self._inbox, 0
        inbox.split_copy_data()
        while not (
            inbox.meets_other or inbox.whole_bytes >= self._chunk_bytes or (inbox.whole_bytes and inbox.is_full)
        ):
            count = inbox.receive()
            if count == 0:
                break
            total += count
            inbox.split_copy_data()
        if total:
            self._hear()
        return total

    def _take_chunk(self) -> Chunk:
        chunk = self._inbox.take_chunk()
        self._received, asked, bad = survey(chunk.data, self._received)
        if bad >= 0:
            raise ProtocolError("replication message is neither a change nor a keepalive", offset=bad)
        with self._lock:
            self._woken = False
        if asked:
            self._server_asked = True
            # If that fails, the chunk is still good; the next read fails.
            with suppress(ConnectionLost):
                self._send_if_due()
        return chunk

    def _take_other(self) -> bool:
        """Process a message that is no CopyData; False while its rest is on the way."""
        message = self._inbox.message()
        if message is None:
            if self._inbox.receive() == 0:
                return False
            self._hear()
            return True
        if self._conversation.take_asynchronous(message):
            return True
        self._ended = True
        if message.kind == messages.ERROR:
            error = self._conversation.failure(message.body, self._slot)
        elif message.kind in (messages.COPY_DONE, messages.COMMAND_COMPLETE):
            error = ConnectionLost(
                f'server ended the stream of replication slot "{self._slot}"',
                hint="The server is shutting down; Headwater reconnects by itself.",
            )
        else:
            error = ProtocolError(f"unexpected message {message.kind!r} in a replication stream")
        self._conversation.close()
        raise error

    def _drain(self, deadline: float) -> bool:
        """Read past everything up to ReadyForQuery. False if that did not come in time."""
        inbox = self._inbox
        while True:
            message: Message | None = None
            inbox.split_copy_data()
            if inbox.whole_bytes:
                # What follows may be here already: waiting for the socket now would wait for nothing.
                inbox.take_chunk()
                continue
            if inbox.meets_other:
                message = inbox.message()
            if message is not None:
                if message.kind == messages.SYNC_END:
                    return True
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            if inbox.receive() == 0:
                self._transport.wait(remaining)

    def _check_open(self) -> None:
        if self._ended or self._conversation.closed:
            raise ConnectionLost(
                f'stream of replication slot "{self._slot}" has ended', hint="Connect and start replication again."
            )
