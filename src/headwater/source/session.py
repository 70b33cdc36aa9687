"""Ordinary SQL sessions on the source or the store: how they are opened, and what psycopg's errors become.

Every session has all timeouts at 0, because one that ends in the middle of a copy ends the exported snapshot with it
(invariant 1), and pins the settings that change what values look like as text. Row security is off in the sense of the
setting: a policy that would hide rows makes the query fail instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    TlsError,
)
from headwater.wire.settings import ConnectSettings

Connection = psycopg.Connection[tuple[Any, ...]]
Parameters = Sequence[Any] | Mapping[str, Any] | None

PINNED: dict[str, str] = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "search_path": "pg_catalog",
    "row_security": "off",
    "default_transaction_isolation": "read committed",
}
_SINCE: dict[str, int] = {"idle_session_timeout": 140000, "transaction_timeout": 170000}

# libpq gives no SQLSTATE for a refused connection, only the text.
_AUTHENTICATION_MARKS = ("authentication failed", "no password supplied", "pg_hba.conf", "is not permitted to log in")
_TLS_MARKS = ("SSL", "certificate", "TLS")


def connect(
    settings: ConnectSettings,
    *,
    application_name: str | None = None,
    autocommit: bool = True,
    tcp_user_timeout_seconds: float | None = None,
) -> Connection:
    """Open a session with everything pinned; raises ConnectError, AuthenticationError, TlsError or PrivilegeError."""
    arguments: dict[str, Any] = {**settings.conninfo(), "client_encoding": "UTF8"}
    if application_name is not None:
        arguments["application_name"] = application_name
    if tcp_user_timeout_seconds is not None:
        arguments["tcp_user_timeout"] = round(tcp_user_timeout_seconds * 1000)
    try:
        # Prepared statements would outlive a pooler's server connection; nothing here is hot enough to need them.
        connection = psycopg.connect(**arguments, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise _connect_error(error, settings) from None
    try:
        _pin(connection)
        connection.autocommit = autocommit
    except psycopg.Error as error:
        connection.close()
        raise translated(error, f"opening a session on {settings.address}") from error
    return connection


def _pin(connection: Connection) -> None:
    version = connection.info.server_version
    pinned = PINNED | {name: "0" for name, since in _SINCE.items() if version >= since}
    connection.execute(
        "SELECT pg_catalog.set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS pinned(name, value)",
        (list(pinned), list(pinned.values())),
    )


def _connect_error(error: psycopg.Error, settings: ConnectSettings) -> HeadwaterError:
    where = f"{settings.address} (database {settings.database!r}, user {settings.username!r})"
    detail = _without_password(_one_line(str(error)), settings)
    if any(mark in detail for mark in _AUTHENTICATION_MARKS):
        return AuthenticationError(
            f"the server did not accept user {settings.username!r} at {settings.address}",
            detail=detail,
            hint="Check username and password of the connection, and the server's pg_hba.conf.",
        )
    if 'database "' in detail and "does not exist" in detail:
        return ConnectError(
            f"cannot connect to {where}",
            detail=detail,
            hint="Check the database's name in the connection settings.",
            retry=Retry.NEVER,
        )
    if any(mark in detail for mark in _TLS_MARKS):
        return TlsError(
            f"TLS with {settings.address} failed",
            detail=detail,
            hint="Check tls.mode and the root certificates of the connection.",
        )
    return ConnectError(
        f"cannot connect to {where}",
        detail=detail,
        hint="Check host and port, and that the server runs and can be reached from here.",
    )


def translated(error: psycopg.Error, doing: str) -> HeadwaterError:
    """Our error for one of psycopg's on an open session. `doing` says what was tried, without values."""
    state = error.sqlstate or ""
    message = error.diag.message_primary or _one_line(str(error)) or type(error).__name__
    detail = f"{message} ({error.diag.message_detail})" if error.diag.message_detail else message
    if lost(error):
        return ConnectionLost(
            f"the session ended while {doing}", detail=detail, hint="The work is tried again on a new connection."
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
        hint=error.diag.message_hint or "Look at the server's log around this time.",
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


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _without_password(text: str, settings: ConnectSettings) -> str:
    password = settings.password.reveal() if settings.password is not None else ""
    return text.replace(password, "***") if password else text
