"""A replication stream with a thread of its own, which never stops answering the server (invariant 8).

The thread reads into a bounded queue and sends status on time, also while the queue is full because nobody takes from it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass

from headwater.engine.bell import Bell
from headwater.errors import HeadwaterError, said_by, where_raised
from headwater.lsn import EndLsn
from headwater.schema.table import quote_identifier
from headwater.wire.chunks import Chunk
from headwater.wire.connection import WireConnection
from headwater.wire.replication import ReplicationStream

log = logging.getLogger(__name__)

QUEUE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a slot is followed."""

    publication: str
    binary: bool
    status_interval_seconds: float
    messages: bool = False
    """Whether logical messages are sent too: the heartbeat's own, and everybody else's."""

    def for_server(self) -> dict[str, str]:
        return {
            # A large transaction comes while it is in progress, so neither side has to hold it.
            "proto_version": "2",
            "streaming": "on",
            "publication_names": quote_identifier(self.publication),
            "binary": "true" if self.binary else "false",
            **({"messages": "true"} if self.messages else {}),
        }


class SlotStream:
    """Owns the connection from here on; `close` ends both."""

    def __init__(
        self, connection: WireConnection, slot: str, start: EndLsn, options: StreamOptions, bell: Bell
    ) -> None:
        self._connection = connection
        self._interval = options.status_interval_seconds
        self._stream: ReplicationStream = connection.start_replication(
            slot, start, options.for_server(), status_interval_seconds=self._interval
        )
        self._bell = bell
        self._condition = threading.Condition()
        self._queue: deque[Chunk] = deque()
        self._queued_bytes = 0
        self._stopping = False
        self._error: HeadwaterError | None = None
        self._thread = threading.Thread(target=self._run, name=f"headwater-read-{slot}", daemon=True)
        self._thread.start()

    def take(self) -> list[Chunk]:
        """Everything that has come. Raises what ended the stream, after the last of it was taken."""
        with self._condition:
            chunks = list(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            self._condition.notify_all()
            if not chunks and self._error is not None:
                raise self._error
        return chunks

    @property
    def dry(self) -> bool:
        with self._condition:
            return not self._queue

    def confirm(self, flushed: EndLsn) -> None:
        self._stream.confirm(flushed)
        with self._condition:
            self._condition.notify_all()

    def request_reply(self) -> None:
        self._stream.request_reply()
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        """End the stream in order, so that what was confirmed last has reached the server, and close the connection."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._stream.wake()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
            self._stream.stop()
        except HeadwaterError as error:
            self._end(error)
        except Exception as error:
            log.error("the replication reader failed: %s\n%s", said_by(error), where_raised(error))
            self._end(
                HeadwaterError(
                    "the replication reader failed",
                    detail=said_by(error),
                    hint="This is a defect of Headwater; report it with the log. Starting again goes on where it was.",
                )
            )

    def _end(self, error: HeadwaterError) -> None:
        with self._condition:
            self._error = error
        self._bell.ring()

    def _step(self) -> None:
        if self._queued_bytes >= QUEUE_BYTES:
            self._stream.tick()
            with self._condition:
                if self._queued_bytes >= QUEUE_BYTES and not self._stopping:
                    self._condition.wait(min(1.0, self._interval))
            return
        chunk = self._stream.read(min(1.0, self._interval))
        if chunk is None:
            return
        with self._condition:
            self._queue.append(chunk)
            self._queued_bytes += len(chunk.data)
        self._bell.ring()
