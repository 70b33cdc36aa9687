"""Ordinary SQL sessions on the source or the store: how they are opened, and what psycopg's errors become.

Every session has all timeouts at 0, because one that ends in the middle of a copy ends the exported snapshot with it
(invariant 1), and pins the settings that change what values look like as text. Row security is off in the sense of the
setting: a policy that would hide rows makes the query fail instead.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import psycopg

from headwater.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLost,
    HeadwaterError,
    PrivilegeError,
    Retry,
    ServerError,
)
from headwater.limits import limit_reached, naming_limits
from headwater.source.connect_errors import connect_error, lacks_binding, one_line
from headwater.source.patient import PatientConnection
from headwater.wire.hosts import ROLE_QUERY, ServerRole, connect_to_first
from headwater.wire.patience import Patience, Verdict
from headwater.wire.server_errors import without_values
from headwater.wire.settings import ConnectSettings
from headwater.wire.sockets import not_ready
from headwater.wire.startup import PINNED, PINNED_SINCE, RESTRICTED
from headwater.wire.tls import check_files, naming_limits_of_files

Connection = psycopg.Connection[tuple[Any, ...]]
Parameters = Sequence[Any] | Mapping[str, Any] | None

LOCK_NOT_AVAILABLE = "55P03"


def connect(
    settings: ConnectSettings,
    *,
    application_name: str | None = None,
    autocommit: bool = True,
    tcp_user_timeout_seconds: float | None = None,
    longest_seconds: float | None = None,
    writes: bool = False,
) -> PatientConnection:
    """Open a session with all its settings pinned, on the first server that accepts it.

    Statements may take as long as they need while the server works on them, unless `longest_seconds` is given. A session that
    `writes` turns off default_transaction_read_only, which a role or a database may have set; the others keep it.

    Raises ConnectError, AuthenticationError, TlsError or PrivilegeError.
    """
    further: dict[str, Any] = {"client_encoding": "UTF8"}
    if application_name is not None:
        further["application_name"] = application_name
    if tcp_user_timeout_seconds is not None:
        further["tcp_user_timeout"] = round(tcp_user_timeout_seconds * 1000)
    connection = connect_to_first(
        settings,
        lambda server: _open(server, further, longest_seconds),
        lambda connection: _ask_role(connection, settings),
    )
    if writes:
        # Only after the server was chosen: target_session_attrs "read-write" asks for the default too, as in libpq.
        try:
            with _answering_in_time(connection, settings), translating("allowing the session to write"):
                connection.execute("SET default_transaction_read_only = off")
        except BaseException:
            connection.close()
            raise
    connection.autocommit = autocommit
    return connection


def _open(settings: ConnectSettings, further: Mapping[str, Any], longest_seconds: float | None) -> PatientConnection:
    if not settings.is_unix_socket:
        with naming_limits_of_files(settings):
            check_files(settings.tls)
    connection = _connected({**settings.conninfo(), **further}, settings)
    if isinstance(connection, HeadwaterError):
        raise connection
    try:
        with naming_limits(f"connecting to {settings.address}"), _answering_in_time(connection, settings):
            _pin(connection)
    except psycopg.Error as error:
        connection.close()
        raise translated(error, f"opening a session on {settings.address}") from error
    except ConnectError:
        connection.close()
        raise
    connection.patience = Patience(settings, _ask_about, connection.info.backend_pid)
    connection.longest_seconds = longest_seconds
    return connection


def _ask_about(settings: ConnectSettings, backend_pid: int) -> Verdict:
    """The outcome of a session on the one server that these settings name. Over our own connection, which reads the SQLSTATE of
    a refusal: libpq has its text only, and servers translate that."""
    # Here and not above: it brings numba, which takes a second, and few commands ever ask.
    from headwater.wire.connection import ask_about

    return ask_about(settings, backend_pid)


def _connected(arguments: Mapping[str, Any], settings: ConnectSettings) -> PatientConnection | HeadwaterError:
    """The error is returned, not raised from here: psycopg's own would stay in its context, and with it the open socket."""
    try:
        # Prepared statements would outlive a pooler's server connection; nothing here is hot enough to need them.
        return PatientConnection.connect(**arguments, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        if settings.tls.verifies and lacks_binding(error) and "channel_binding" not in arguments:
            # A certificate that cannot be bound but is verified already says who the server is.
            return _connected({**arguments, "channel_binding": "disable"}, settings)
        return connect_error(error, settings)
    except OSError as error:
        # psycopg waits with a file of its own.
        limit = limit_reached(error, f"connecting to {settings.address}")
        if limit is None:
            raise
        return limit


@contextmanager
def _answering_in_time(connection: Connection, settings: ConnectSettings) -> Iterator[None]:
    """psycopg's timeout ends where the login does."""
    with shut_down_after(connection, settings.connect_timeout_seconds) as late:
        try:
            yield
        except (psycopg.Error, ConnectionLost):
            if late.is_set():
                raise not_ready(settings) from None
            raise


@contextmanager
def shut_down_after(connection: Connection, seconds: float) -> Iterator[threading.Event]:
    """For calls that would wait without a limit: after that time their socket is shut down, and the event is set."""
    late = threading.Event()
    with naming_limits("watching over a session"), socket.socket(fileno=os.dup(connection.fileno())) as same:

        def shut_down() -> None:
            late.set()
            with suppress(OSError):
                same.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, shut_down)
        timer.daemon = True
        timer.start()
        try:
            yield late
        finally:
            timer.cancel()
            timer.join()


def _ask_role(connection: Connection, settings: ConnectSettings) -> ServerRole:
    with _answering_in_time(connection, settings):
        row = fetch_one(connection, ROLE_QUERY, doing="asking the server for its role")
    assert row is not None
    return ServerRole.parse(*row)


def _pin(connection: Connection) -> None:
    version = connection.info.server_version
    pinned = PINNED | {name: "0" for since, name in PINNED_SINCE if version >= since}
    connection.execute(
        "SELECT pg_catalog.set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS pinned(name, value)",
        (list(pinned), list(pinned.values())),
    )
    connection.execute(RESTRICTED)


def translated(error: psycopg.Error, doing: str) -> HeadwaterError:
    """Our error for one of psycopg's on an open session. `doing` says what was tried, without values."""
    state = error.sqlstate or ""
    said = error.diag.message_primary or one_line(str(error)) or type(error).__name__
    message, more = without_values(state, said, error.diag.message_detail or "")
    detail = f"{message} ({more})" if more else message
    if lost(error):
        return ConnectionLost(
            f"the session ended while {doing}", detail=detail, hint="This is retried on a new connection."
        )
    if state.startswith("28"):
        return AuthenticationError(
            f"the server refused the role while {doing}", detail=detail, hint="Check the connection's username."
        )
    if state == "42501":
        return PrivilegeError(
            f"the role lacks a right for {doing}",
            detail=detail,
            hint=error.diag.message_hint or "Grant the right to the connection's role.",
        )
    return ServerError(
        f"the server failed while {doing}",
        sqlstate=state,
        detail=f"{detail} (SQLSTATE {state})" if state else detail,
        hint=error.diag.message_hint or "See the server's log around this time.",
        retry=Retry.TIMED if state[:2] in ("40", "53", "55", "57", "58") else None,
    )


def lost(error: psycopg.Error) -> bool:
    """Whether the error means that the session is gone, not that a statement was refused."""
    if not isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return False
    state = error.sqlstate or ""
    return not state or state.startswith("08") or state in ("57P01", "57P02", "57P03", "57P04", "57P05")


@contextmanager
def translating(doing: str) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translated(error, doing) from error


@contextmanager
def impatient(connection: Connection, seconds: float) -> Iterator[None]:
    """Statements that would wait longer than this for a lock fail, with SQLSTATE 55P03."""
    with translating("setting lock_timeout"):
        connection.execute("SELECT pg_catalog.set_config('lock_timeout', %s, false)", (f"{round(seconds * 1000)}ms",))
    try:
        yield
    finally:
        with translating("setting lock_timeout"):
            connection.execute("SET lock_timeout = 0")


def fetch_all(
    connection: Connection, query: LiteralString, parameters: Parameters = None, *, doing: str
) -> list[tuple[Any, ...]]:
    with translating(doing):
        return connection.execute(query, parameters).fetchall()


def fetch_one(
    connection: Connection, query: LiteralString, parameters: Parameters = None, *, doing: str
) -> tuple[Any, ...] | None:
    with translating(doing):
        return connection.execute(query, parameters).fetchone()
