"""One session's messages, in order: what is sent, what is waited for, and what a server may send at any time.

Handles no statement. Commands are sent by the connection, changes received by the stream; both use this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

from headwater.errors import ConnectionLost, HeadwaterError, ProtocolError
from headwater.wire import messages
from headwater.wire.chunks import Inbox
from headwater.wire.messages import ErrorFields, Message
from headwater.wire.patience import Patience, silent
from headwater.wire.server_errors import to_error
from headwater.wire.settings import ConnectSettings
from headwater.wire.sockets import not_ready
from headwater.wire.transport import Transport

_log = logging.getLogger(__name__)


class Conversation:
    """Belongs to the thread that its connection belongs to."""

    def __init__(self, settings: ConnectSettings, transport: Transport, patience: Patience) -> None:
        self.settings = settings
        self.transport = transport
        self.patience = patience
        self.inbox = Inbox(transport)
        self.occupied_by = ""
        """What the session is busy with; empty when it takes commands."""
        self.parameters: dict[str, str] = {}

    @property
    def closed(self) -> bool:
        return self.transport.closed

    def close(self) -> None:
        """End the session. May be called twice."""
        if not self.transport.closed:
            if not self.occupied_by:
                with suppress(ConnectionLost):
                    self.transport.send(messages.terminate())
            self.transport.close()

    def take_asynchronous(self, message: Message) -> bool:
        """Whether this was one of the messages a server may send at any time; if so it is processed."""
        if message.kind == messages.PARAMETER_STATUS:
            name, value = messages.parse_parameter(message.body)
            known = len(self.parameters.keys() | {name})
            if len(message.body) > messages.MAX_PARAMETER_BYTES or known > messages.MAX_PARAMETERS:
                raise ProtocolError(
                    "server reports more settings than a server has",
                    detail=f"{known} so far, the last of {len(message.body)} bytes",
                    hint="Check that host and port are those of a Postgres server.",
                )
            self.parameters[name] = value
        elif message.kind == messages.NOTICE:
            notice = messages.parse_error_fields(message.body)
            _log.log(
                logging.WARNING if notice.severity == "WARNING" else logging.DEBUG,
                "server at %s: %s %s: %s", self.settings.address, notice.severity, notice.sqlstate, notice.message,
            )  # fmt: skip
        elif message.kind != messages.NOTIFICATION:
            return False
        return True

    def failure(self, body: bytes, slot: str | None) -> HeadwaterError:
        return to_error(messages.parse_error_fields(body), self.settings, slot=slot)

    def release(self) -> None:
        """The stream has ended in order: the session takes commands again."""
        self.inbox.reserve(0)
        self.occupied_by = ""

    def silent(self, seconds: float) -> ConnectionLost:
        return silent(self.settings, seconds, "the requested reply did not come")

    def begin(self, what: str, sql: str, longest_seconds: float | None = None) -> None:
        if self.closed:
            raise ConnectionLost(
                f"connection to the server at {self.settings.address} is closed", hint="Open a new connection."
            )
        if self.occupied_by:
            raise RuntimeError(f"connection is busy with a {self.occupied_by} and takes no {what}")
        self.occupied_by = what
        self.patience.begin(longest_seconds)
        with self.closing_on_failure():
            try:
                self.transport.send(messages.query(sql))
            except ConnectionLost as error:
                raise self._last_word() or error from None

    def _last_word(self) -> HeadwaterError | None:
        """Why the server closed the connection, if it said so before: that is still in the buffers when a send fails."""
        with suppress(ConnectionLost, ProtocolError):
            while True:
                while (message := self.inbox.message()) is not None:
                    if message.kind == messages.ERROR:
                        return self.failure(message.body, None)
                if self.inbox.receive() == 0:
                    break
        return None

    def enter_copy(self, expected: bytes, command: str, slot: str | None = None) -> None:
        """Wait until the server begins to copy; an error instead leaves the session usable."""
        failure: ErrorFields | None = None
        while True:
            kind, body = self.next_answer(failure)
            if kind == expected and failure is None:
                return
            if kind == messages.ERROR:
                failure = messages.parse_error_fields(body)
            elif kind == messages.SYNC_END:
                self.occupied_by = ""
                if failure is None:
                    raise ProtocolError("command did not start a COPY", hint="Pass one COPY ... TO STDOUT statement.")
                raise to_error(failure, self.settings, slot=slot)
            elif kind not in (
                messages.COMMAND_COMPLETE,
                messages.ROW_DESCRIPTION,
                messages.DATA_ROW,
                messages.EMPTY_QUERY,
            ):
                raise unexpected(kind, "before a COPY begins")

    def next_answer(self, failure: ErrorFields | None) -> Message:
        while self.take_asynchronous(message := self.next_of_any_kind(failure)):
            pass
        return message

    def next_of_any_kind(self, failure: ErrorFields | None, allowed: Mapping[bytes, int] | None = None) -> Message:
        """Wait for one message. If the server sent a reason before it closed the connection, that reason is the error."""
        deadline = self.transport.deadline
        if deadline is not None:
            self._check_start(deadline)
            allowed = allowed or messages.WHILE_STARTING
        try:
            while (message := self.inbox.message(allowed)) is None:
                if self.inbox.receive() == 0:
                    if deadline is None:
                        self.wait_for_answer()
                    else:
                        self.transport.wait_until(deadline, self.settings)
                elif deadline is not None:
                    self._check_start(deadline)
                else:
                    self.patience.heard()
        except ConnectionLost:
            if failure is None:
                raise
            raise to_error(failure, self.settings) from None
        return message

    def wait_for_answer(self) -> None:
        if not self.transport.wait(self.patience.step_seconds):
            self.patience.check()

    def _check_start(self, deadline: float) -> None:
        """A server that never stops sending would block us for ever: it has a limit of time and of bytes."""
        if time.monotonic() >= deadline:
            raise not_ready(self.settings)
        if self.inbox.received > messages.MAX_START_BYTES:
            raise ProtocolError(
                "server sends too much before the session is ready",
                detail=f"more than {messages.MAX_START_BYTES >> 20} MiB",
                hint="Check that host and port are those of a Postgres server, and for a login trigger with many notices.",
            )

    def closing_on_failure(self) -> _ClosingOnFailure:
        return _ClosingOnFailure(self)


class _ClosingOnFailure:
    """An exchange of messages that ended in the middle cannot be resumed: what is sent next would be misread."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self._conversation.occupied_by:
            self._conversation.transport.close()


def unexpected(kind: bytes, when: str) -> ProtocolError:
    return ProtocolError(f"unexpected message {kind!r} {when}")
