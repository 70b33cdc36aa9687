"""A replication stream with a thread of its own, which never stops answering the server (invariant 8).

The thread reads into a bounded queue and sends status on time, also while the queue is full because the follower does not read.
It leaves a server that is being stopped, which would wait for positions that cannot be confirmed any more.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from headwater.engine.run_lock import RunLock
from headwater.engine.source import Source
from headwater.engine.wake_up import WakeUp
from headwater.errors import ConnectionLost, HeadwaterError, said_by, where_raised
from headwater.limits import limit_reached, naming_limits
from headwater.lsn import EndLsn
from headwater.schema.table import quote_identifier
from headwater.wire.chunks import Chunk
from headwater.wire.connection import WireConnection
from headwater.wire.patience import ServerSilent
from headwater.wire.replication import ReplicationStream

log = logging.getLogger(__name__)

QUEUE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a slot is followed."""

    publication: str
    binary: bool
    status_interval_seconds: float
    silence_seconds: float = 60.0
    """How long the server may say nothing."""
    messages: bool = False
    """Whether logical messages are sent too: the heartbeat's own, and those of others."""

    def for_server(self) -> dict[str, str]:
        return {
            # A large transaction comes while it is in progress, so neither side has to hold it.
            "proto_version": "2",
            "streaming": "on",
            "publication_names": quote_identifier(self.publication),
            "binary": "true" if self.binary else "false",
            **({"messages": "true"} if self.messages else {}),
        }


class SilenceLimit:
    """How long the next stream of a slot may be silent: twice as long as the last one, if that fell silent where it began.

    A server before version 15 says nothing while it decodes a large transaction that holds nothing for us. Left each time after
    the same while, it would begin at the same place for ever.
    """

    _MOST_DOUBLINGS = 6

    def __init__(self) -> None:
        self._doublings = 0
        self._stream: SlotStream | None = None
        self._began: EndLsn | None = None

    def next(self, begins: EndLsn, options: StreamOptions) -> StreamOptions:
        fell_silent = self._stream is not None and self._stream.fell_silent
        if not fell_silent or begins != self._began:
            self._doublings = 0
        else:
            self._doublings = min(self._doublings + 1, self._MOST_DOUBLINGS)
        return replace(options, silence_seconds=options.silence_seconds * 2**self._doublings)

    def begun(self, stream: SlotStream, begins: EndLsn) -> SlotStream:
        self._stream, self._began = stream, begins
        return stream


class SlotStreams:
    """Begins the streams of one slot, one after the other."""

    def __init__(self, source: Source, name: str, lock: RunLock, wake_up: WakeUp, *, messages: bool = False) -> None:
        self._source = source
        self._name = name
        self._lock = lock
        self._wake_up = wake_up
        self._messages = messages
        self._silence = SilenceLimit()

    def begin(self, connection: WireConnection, start: EndLsn, *, binary: bool) -> SlotStream:
        options = StreamOptions(
            self._source.publication,
            binary,
            self._source.status_interval_seconds,
            self._source.silence_seconds,
            self._messages,
        )
        options = self._silence.next(start, options)
        stream = SlotStream(connection, self._name, start, options, self._wake_up, self._lock.is_out_of_reach)
        return self._silence.begun(stream, start)


class SlotStream:
    """Owns the connection from here on; `close` ends both."""

    def __init__(
        self,
        connection: WireConnection,
        slot: str,
        start: EndLsn,
        options: StreamOptions,
        wake_up: WakeUp,
        leaves: Callable[[], bool] = lambda: False,
    ) -> None:
        """`leaves` says whether nothing can be confirmed over this connection any more."""
        self.start = start
        self._connection = connection
        self._leaves = leaves
        self._interval = options.status_interval_seconds
        self._stream: ReplicationStream = connection.start_replication(
            slot,
            start,
            options.for_server(),
            status_interval_seconds=self._interval,
            silence_seconds=options.silence_seconds,
        )
        self._wake_up = wake_up
        self._condition = threading.Condition()
        self._queue: deque[Chunk] = deque()
        self._queued_bytes = 0
        self._stopping = False
        self._error: HeadwaterError | None = None
        self._thread = threading.Thread(target=self._run, name=f"headwater-read-{slot}", daemon=True)
        with naming_limits(f'following replication slot "{slot}"'):
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
    def fell_silent(self) -> bool:
        """Whether that is what ended it."""
        with self._condition:
            return isinstance(self._error, ServerSilent)

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
            if (limit := limit_reached(error, "reading the replication stream")) is not None:
                self._end(limit)
                return
            log.error("the replication reader failed: %s\n%s", said_by(error), where_raised(error))
            self._end(
                HeadwaterError(
                    "the replication reader failed",
                    detail=said_by(error),
                    hint="This is a defect of Headwater; report it with the log. Starting again goes on where it was.",
                )
            )

    def _end(self, error: HeadwaterError) -> None:
        # Now, and not when the error is raised: the follower may be in the middle of a write.
        self._connection.close()
        with self._condition:
            self._error = error
        self._wake_up.notify()

    def _step(self) -> None:
        if self._leaves():
            raise ConnectionLost(
                "the replication stream was left: the server takes no sessions of ours",
                detail="the session with the pipeline's lock was ended and cannot be opened again",
                hint="Nothing is to be done if the server is being stopped or restarted: it is followed again when it is back.",
            )
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
        self._wake_up.notify()
