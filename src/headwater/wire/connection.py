"""Our own implementation of a connection to Postgres: simple queries, COPY out, replication.

libpq hands COPY data over message by message and that is most of what reading costs; here it leaves in chunks.
Everything else is as plain as the protocol allows: no prepared statements, no types, text results. Ordinary SQL
belongs to psycopg.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Self

from headwater.errors import AuthenticationError, ConnectionLost, HeadwaterError, ProtocolError, TlsError
from headwater.lsn import EndLsn
from headwater.wire import messages
from headwater.wire.auth import Authentication
from headwater.wire.chunks import Chunk
from headwater.wire.commands import identifier, literal, slot_named_in
from headwater.wire.conversation import Conversation, unexpected
from headwater.wire.hosts import ROLE_QUERY, ServerRole, connect_to_first
from headwater.wire.messages import ErrorFields, Message
from headwater.wire.pacing import Pacing
from headwater.wire.patience import Patience, Verdict
from headwater.wire.probe import what_became_of
from headwater.wire.replication import ReplicationStream
from headwater.wire.server_errors import to_error
from headwater.wire.settings import ConnectSettings, TargetSessionAttrs
from headwater.wire.startup import PINNED, PINNED_SINCE, RESTRICTED, RESTRICTED_SINCE
from headwater.wire.tls import alerted, check_files, naming_limits_of_files
from headwater.wire.tls_config import TlsMode
from headwater.wire.transport import Transport, open_transport


class WireConnection:
    """One session. Belongs to one thread at a time, except `cancel`, which any thread may call."""

    def __init__(self, settings: ConnectSettings, transport: Transport) -> None:
        self._settings = settings
        self._transport = transport
        self._conversation = Conversation(settings, transport, Patience(settings, ask_about))
        self._inbox = self._conversation.inbox
        self._key = b""
        self.backend_pid = 0

    @classmethod
    def connect(
        cls, settings: ConnectSettings, *, replication: bool = False, options: Mapping[str, str] = MappingProxyType({})
    ) -> WireConnection:
        """Open a session on the first server that accepts it. `options` are session settings, which override the pinned."""
        connection = connect_to_first(
            settings, lambda server: cls._open_preferring_tls(server, replication, options), cls._ask_role
        )
        # One deadline and one limit for all until here: the TLS handshake, the login, our first queries.
        connection._transport.deadline = None
        return connection

    @classmethod
    def _open_preferring_tls(
        cls, settings: ConnectSettings, replication: bool, options: Mapping[str, str]
    ) -> WireConnection:
        if settings.tls.sslmode is TlsMode.PREFER and not settings.is_unix_socket:
            # Files that cannot be used are for the user to repair, and no reason to continue without TLS.
            with naming_limits_of_files(settings):
                check_files(settings.tls)
        deadline = time.monotonic() + settings.connect_timeout_seconds
        try:
            return cls._open(settings, replication, options, deadline)
        except (TlsError, AuthenticationError) as error:
            # libpq's prefer: a server that has TLS but cannot use it with us, or admits this role only without TLS, gets a
            # second attempt without it. Without TLS already, or with a wrong password, it would fail the same way again.
            if settings.tls.sslmode is not TlsMode.PREFER or settings.is_unix_socket:
                raise
            if isinstance(error, AuthenticationError) and "pg_hba.conf" not in error.message:
                raise
            plain = replace(settings, tls=replace(settings.tls, mode=TlsMode.DISABLE))
            try:
                return cls._open(plain, replication, options, deadline)
            except HeadwaterError:
                raise error from None

    @classmethod
    def _open(
        cls, settings: ConnectSettings, replication: bool, options: Mapping[str, str], deadline: float
    ) -> WireConnection:
        transport = open_transport(settings, deadline)
        try:
            if settings.tls.sslmode is not TlsMode.DISABLE and not settings.is_unix_socket:
                with naming_limits_of_files(settings):
                    transport.start_tls(settings, deadline)
            connection = cls(settings, transport)
            connection._start_session(replication, options)
        except BaseException:
            transport.close()
            raise
        return connection

    def _start_session(self, replication: bool, options: Mapping[str, str]) -> None:
        parameters = {
            "user": self._settings.username,
            "database": self._settings.database,
            "application_name": self._settings.application_name,
            **PINNED,
            **options,
        }
        if replication:
            parameters["replication"] = "database"
        with suppress(ConnectionLost):
            # A server that has closed the connection may have sent a reason, which is still to be read.
            self._transport.send(messages.startup(parameters))
        authentication = Authentication(self._settings, self._transport.tls_object)
        while True:
            kind, body = message = self._next_while_starting(
                messages.WHILE_STARTING if authentication.finished else messages.BEFORE_LOGIN
            )
            if kind == messages.AUTHENTICATION and not authentication.finished:
                if (answer := authentication.answer(body)) is not None:
                    self._transport.send(answer)
            elif kind == messages.ERROR:
                raise to_error(messages.parse_error_fields(body), self._settings, starting=True)
            elif kind == messages.BACKEND_KEY:
                self.backend_pid, self._key = messages.parse_backend_key(body)
                self._conversation.patience.backend_pid = self.backend_pid
            elif kind == messages.SYNC_END:
                break
            elif kind != messages.NEGOTIATE_VERSION and not self._conversation.take_asynchronous(message):
                raise unexpected(kind, "while the session starts")
        newer = [name for since, name in PINNED_SINCE if self.server_version >= since and name not in options]
        if self.server_version >= RESTRICTED_SINCE:
            self.query("; ".join([*(f"SET {name} = 0" for name in newer), RESTRICTED]))

    def _next_while_starting(self, allowed: Mapping[bytes, int]) -> Message:
        try:
            return self._conversation.next_of_any_kind(None, allowed)
        except ConnectionLost as error:
            # Under TLS 1.3 a server refuses a client's certificate only after the handshake is over for the client.
            reason = str(getattr(error.__cause__, "reason", ""))
            if "ALERT" in reason:
                raise alerted(self._settings, reason) from error
            raise

    def _ask_role(self) -> ServerRole:
        (row,) = self.query(ROLE_QUERY)
        return ServerRole.parse(row["in_recovery"], row["read_only"])

    @property
    def server_version(self) -> int:
        """As Postgres counts: 18.6 is 180006."""
        text = self.parameters.get("server_version", "")
        found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)
        if found is None:
            raise ProtocolError("server did not report its version", detail=f"server_version is {text!r}")
        major, minor, patch = (int(part or 0) for part in found.groups())
        return major * 10000 + minor if major >= 10 else major * 10000 + minor * 100 + patch

    @property
    def parameters(self) -> Mapping[str, str]:
        """What the server reported of its settings."""
        return self._conversation.parameters

    @property
    def closed(self) -> bool:
        return self._conversation.closed

    def query(self, sql: str, *, waits: bool = False) -> list[dict[str, str | None]]:
        """Run SQL or a replication command; the rows of its last result, as text.

        One that `waits` for others, or works for long, has no deadline while the server is at work (see `patience`).
        """
        self._conversation.begin("query", sql, None if waits else self._settings.answer_timeout_seconds)
        names: list[str] = []
        rows: list[dict[str, str | None]] = []
        failure: ErrorFields | None = None
        with self._conversation.closing_on_failure():
            while True:
                kind, body = self._conversation.next_answer(failure)
                if kind == messages.SYNC_END:
                    break
                if kind == messages.ROW_DESCRIPTION:
                    names, rows = messages.parse_column_names(body), []
                elif kind == messages.DATA_ROW:
                    values = messages.parse_row(body)
                    if len(values) != len(names):
                        raise ProtocolError(
                            "row does not fit its description", detail=f"{len(values)} of {len(names)} values"
                        )
                    rows.append(dict(zip(names, values, strict=True)))
                elif kind == messages.ERROR:
                    failure = messages.parse_error_fields(body)
                elif kind not in (messages.COMMAND_COMPLETE, messages.EMPTY_QUERY):
                    raise unexpected(kind, "in the answer to a query")
        self._conversation.occupied_by = ""
        if failure is not None:
            raise to_error(failure, self._settings, slot=slot_named_in(sql))
        return rows

    def copy_out(self, sql: str, *, chunk_bytes: int = 8 << 20) -> Iterator[Chunk]:
        """Run COPY ... TO STDOUT. Errors of the server are raised here or while iterating, wherever they happen.

        The connection is busy until the iterator is exhausted. One that is abandoned before takes the connection with
        it: the rest of the data would have to be read to get past it.
        """
        self._conversation.begin("COPY", sql)
        with self._conversation.closing_on_failure():
            self._conversation.enter_copy(messages.COPY_OUT, sql)
            self._inbox.reserve(chunk_bytes)
        return self._copied_chunks(chunk_bytes)

    def _copied_chunks(self, chunk_bytes: int) -> Iterator[Chunk]:
        inbox, pacing = self._inbox, Pacing(self._transport)
        failure: ErrorFields | None = None
        with self._conversation.closing_on_failure():
            while True:
                inbox.split_copy_data()
                if inbox.whole_bytes and (inbox.whole_bytes >= chunk_bytes or inbox.is_full or inbox.meets_other):
                    yield inbox.take_chunk()
                    # The caller that takes chunks may be slow; that does not count as silence of the server.
                    self._conversation.patience.heard()
                    continue
                if inbox.meets_other:
                    kind, body = message = self._conversation.next_of_any_kind(failure)
                    if kind == messages.SYNC_END:
                        break
                    if kind == messages.ERROR:
                        failure = messages.parse_error_fields(body)
                    elif kind not in (
                        messages.COPY_DONE,
                        messages.COMMAND_COMPLETE,
                    ) and not self._conversation.take_asynchronous(message):
                        raise unexpected(kind, "in the data of a COPY")
                    continue
                if (count := inbox.receive()) == 0:
                    self._conversation.wait_for_answer()
                    continue
                self._conversation.patience.heard()
                pacing.arrived(count)
                if pacing.wants_nap(count):
                    pacing.nap()
        self._inbox.reserve(0)
        self._conversation.occupied_by = ""
        if failure is not None:
            raise to_error(failure, self._settings)

    def start_replication(
        self,
        slot: str,
        start: EndLsn,
        options: Mapping[str, str],
        *,
        status_interval_seconds: float = 10.0,
        silence_seconds: float | None = None,
        chunk_bytes: int = 4 << 20,
    ) -> ReplicationStream:
        """Follow a logical slot from `start` (or from what it has confirmed, if that is later).

        A server that sends nothing for half of `silence_seconds` is asked for a reply; after the whole of it the connection is
        given up.
        """
        longest = self._settings.answer_timeout_seconds
        listed = ", ".join(f"{identifier(name)} {literal(value)}" for name, value in options.items())
        command = f"START_REPLICATION SLOT {identifier(slot)} LOGICAL {start}" + (f" ({listed})" if listed else "")
        self._conversation.begin("replication", command, longest)
        with self._conversation.closing_on_failure():
            self._conversation.enter_copy(messages.COPY_BOTH, command, slot)
            self._inbox.reserve(chunk_bytes)
        return ReplicationStream(
            self._conversation,
            slot,
            start,
            status_interval_seconds=status_interval_seconds,
            silence_seconds=longest if silence_seconds is None else silence_seconds,
            chunk_bytes=chunk_bytes,
        )

    def cancel(self) -> None:
        """Ask the server, over a second connection, to cancel what this session does. Returns once the request was sent."""
        deadline = time.monotonic() + self._settings.connect_timeout_seconds
        transport = open_transport(self._settings, deadline)
        try:
            if self._transport.tls_object is not None:
                transport.start_tls(self._settings, deadline)
            transport.send(messages.cancel_request(self.backend_pid, self._key))
            # The server answers by closing, after it has sent the signal.
            with suppress(ConnectionLost):
                while transport.receive_into(memoryview(bytearray(64))) == 0:
                    transport.wait_until(deadline, self._settings)
        finally:
            transport.close()

    def close(self) -> None:
        """End the session. May be called twice."""
        self._conversation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def ask_about(settings: ConnectSettings, backend_pid: int) -> Verdict:
    """The outcome of a session on the one server that these settings name."""
    seconds = settings.connect_timeout_seconds
    same = replace(settings, target_session_attrs=TargetSessionAttrs.ANY, answer_timeout_seconds=seconds)

    def ask(question: str) -> tuple[int, dict[str, str | None]]:
        with WireConnection.connect(same) as session:
            # The question is short, and this session itself is never asked about.
            session._conversation.patience = Patience(same, None)
            (row,) = session.query(question)
            return session.backend_pid, row

    return what_became_of(backend_pid, ask)
