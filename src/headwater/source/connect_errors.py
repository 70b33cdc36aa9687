"""Why psycopg could not connect, as the same errors that our own connection raises.

libpq gives no SQLSTATE for a refused connection, only its text, so the text decides; what matches nothing is a ConnectError.
"""

from __future__ import annotations

import psycopg

from headwater.errors import AuthenticationError, ConnectError, HeadwaterError, Retry, TlsError
from headwater.limits import limit_told
from headwater.wire import tls
from headwater.wire.auth import binding_impossible, cleartext_refused, md5_refused
from headwater.wire.server_errors import channel_differs, client_certificate_missing
from headwater.wire.settings import ConnectSettings

_AUTHENTICATION_MARKS = ("authentication failed", "no password supplied", "pg_hba.conf", "is not permitted to log in")
_BINDING_MARKS = ("could not find digest for NID", "could not determine server certificate signature algorithm")
_SERVER_SPEAKS = "FATAL:"
_TLS_MARKS = ("SSL", "certificate", "TLS")


def lacks_binding(error: psycopg.Error) -> bool:
    """Whether libpq could not bind SCRAM to the TLS connection, because of the certificate's kind of signature."""
    return any(mark in str(error) for mark in _BINDING_MARKS)


def connect_error(error: psycopg.Error, settings: ConnectSettings) -> HeadwaterError:
    """`settings` of the one server that was tried."""
    where = f"{settings.address} (database {settings.database!r}, user {settings.username!r})"
    detail = one_line(_without_secrets(str(error), settings))
    # Not of what a server said: its limits are not ours.
    if _SERVER_SPEAKS not in detail and (limit := limit_told(detail, f"connecting to {settings.address}")) is not None:
        return limit
    if "server requested a cleartext password" in detail:
        return cleartext_refused(settings)
    if "server requested a hashed password" in detail:
        return md5_refused(settings)
    if lacks_binding(error):
        return binding_impossible(settings)
    if "requires a valid client certificate" in detail:
        return client_certificate_missing(settings, detail)
    if "channel binding check failed" in detail or "channel binding negotiation error" in detail:
        return channel_differs(settings, detail)
    if any(mark in detail for mark in _AUTHENTICATION_MARKS):
        return AuthenticationError(
            f"the server did not accept user {settings.username!r} at {settings.address}",
            detail=detail,
            hint="Check username and password of the connection, its client certificate if it has one, and the "
            "server's pg_hba.conf.",
        )
    if 'database "' in detail and "does not exist" in detail:
        return ConnectError(
            f"cannot connect to {where}",
            detail=detail,
            hint="Check the database's name in the connection settings.",
            retry=Retry.NEVER,
        )
    if any(mark in detail for mark in _TLS_MARKS):
        return _tls_error(detail, settings)
    return ConnectError(
        f"cannot connect to {where}",
        detail=detail,
        hint="Check host and port, and that the server runs and is reachable from this machine.",
    )


def _tls_error(detail: str, settings: ConnectSettings) -> TlsError:
    if "does not match host name" in detail:
        return tls.another_name(settings, detail)
    if "certificate verify failed" in detail:
        return tls.not_trusted(settings, detail)
    if "does not support SSL" in detail:
        return tls.refused(settings)
    if "alert" in detail:
        return tls.alerted(settings, detail)
    return TlsError(
        f"TLS with {settings.address} failed",
        detail=detail,
        hint="Check tls.mode and the root certificates of the connection.",
    )


def one_line(text: str) -> str:
    return " ".join(text.split())


def _without_secrets(text: str, settings: ConnectSettings) -> str:
    for secret in (settings.password, settings.tls.client_key_password):
        if secret is not None and secret.reveal():
            text = text.replace(secret.reveal(), "***")
    return text
