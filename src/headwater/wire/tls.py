"""TLS as libpq's sslmode means it, over memory buffers.

The socket stays a plain non-blocking one and OpenSSL works on bytes we hand it. So one wait serves both kinds of
connection (no `pending()` to forget beside a select), and a large read feeds many TLS records at once, where an
`SSLSocket` makes two system calls for each record, which for a walsender means two for each change.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from headwater.errors import TlsError
from headwater.limits import limit_reached
from headwater.secret import Secret
from headwater.wire.pem import is_pem, pem_path, pem_text
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls_config import TlsConfig, TlsMode

# X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
_NAME_MISMATCH_CODES = (62, 64)


class TlsSession:
    """OpenSSL's half of a connection. Knows no socket; used by one thread at a time."""

    __slots__ = ("_incoming", "_object", "_outgoing")

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=False, server_hostname=host)

    @property
    def ssl_object(self) -> ssl.SSLObject:
        return self._object

    def handshake_step(self) -> bool:
        """True when the handshake is done, False when bytes of the server are needed."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def feed(self, ciphertext: memoryview) -> None:
        self._incoming.write(ciphertext)

    def outgoing(self) -> bytes:
        """Ciphertext that has to be sent; empty when there is none."""
        return self._outgoing.read()

    def encrypt(self, plain: bytes) -> bytes:
        self._object.write(plain)
        return self._outgoing.read()

    def decrypt_into(self, view: memoryview) -> int:
        """Plaintext of the records fed so far; 0 when more ciphertext is needed."""
        total = 0
        while total < len(view):
            try:
                # typeshed knows only the form that returns bytes.
                count: Any = self._object.read(len(view) - total, view[total:])
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError:
                if total:
                    break  # the last data and the end may come in one piece; the next call reports the end again
                raise
            if count == 0:
                break
            total += count
        return total

    @property
    def has_buffered(self) -> bool:
        return self._incoming.pending > 0 or self._object.pending() > 0


def make_context(settings: ConnectSettings) -> ssl.SSLContext:
    tls = settings.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = tls.sslmode is TlsMode.VERIFY_FULL
    context.verify_mode = ssl.CERT_REQUIRED if tls.verifies else ssl.CERT_NONE
    load_client_certificate(context, tls)
    if tls.verifies and tls.root_certs is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    elif tls.verifies:
        load_root_certs(context, tls)
    return context


def load_root_certs(context: ssl.SSLContext, tls: TlsConfig) -> None:
    if tls.root_certs is None:
        return
    try:
        context.load_verify_locations(cadata=pem_text(tls.root_certs))
    except (OSError, ValueError) as error:
        where = "text" if is_pem(tls.root_certs) else f"file {tls.root_certs}"
        raise TlsError(
            "trusted root certificates could not be loaded",
            detail=f"{where}: {error}",
            hint="Give tls.trusted_root_certs the path of a readable PEM file, or the PEM text itself.",
        ) from error


def load_client_certificate(context: ssl.SSLContext, tls: TlsConfig) -> None:
    if tls.client_cert is None or tls.client_key is None:
        return
    key = tls.client_key.reveal()
    try:
        if not is_pem(key):
            _refuse_readable_by_others(key)
        # Without a password OpenSSL would ask for one at the terminal.
        password = tls.client_key_password.reveal() if tls.client_key_password is not None else ""
        context.load_cert_chain(pem_path(tls.client_cert), pem_path(key), password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise TlsError(
            "client certificate could not be loaded",
            detail=f"tls.client_cert, tls.client_key: {reason}",
            hint="Give both as the path of a readable PEM file, or as PEM text, the key that belongs to the certificate, "
            "and tls.client_key_password if the key is encrypted.",
        ) from None


def _refuse_readable_by_others(key: str) -> None:
    """libpq's rule, so that a key which psycopg refuses is not accepted by our own connection."""
    found = os.stat(key)
    allowed = stat.S_IRWXU | (stat.S_IRGRP if found.st_uid == 0 else 0)
    if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) & ~allowed:
        raise TlsError(
            "client key is readable by other users",
            detail=f"file {key} has mode {stat.S_IMODE(found.st_mode):04o}",
            hint=f"Remove the rights of others: chmod 600 {key}",
        )


def check_files(tls: TlsConfig) -> None:
    """Raise TlsError if libpq is about to read files that cannot be used; libpq's own messages say less."""
    if tls.sslmode is TlsMode.DISABLE:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load_client_certificate(context, tls)
    if tls.verifies:
        load_root_certs(context, tls)


@contextmanager
def naming_limits_of_files(settings: ConnectSettings) -> Iterator[None]:
    """A certificate that cannot be read because no file can be opened is no wrong certificate."""
    try:
        yield
    except TlsError as error:
        limit = limit_reached(error, f"reading the certificates for {settings.address}")
        if limit is None:
            raise
        raise limit from error


def with_contents(settings: ConnectSettings) -> ConnectSettings:
    """The same settings with texts in place of paths, for a machine that does not have the files."""
    tls = settings.tls
    if tls.sslmode is TlsMode.DISABLE:
        return settings
    check_files(tls)
    key = Secret(pem_text(tls.client_key.reveal())) if tls.client_key is not None else None
    read = replace(
        tls,
        trusted_root_certs=pem_text(tls.root_certs) if tls.root_certs is not None and tls.verifies else None,
        client_cert=pem_text(tls.client_cert) if tls.client_cert is not None else None,
        client_key=key,
    )
    return replace(settings, tls=read)


def refused(settings: ConnectSettings) -> TlsError:
    return TlsError(
        f"server at {settings.address} does not offer TLS",
        detail=f"tls.mode is {settings.tls.sslmode}; the server answered the request for TLS with no",
        hint='Turn TLS on at the server (ssl = on, a certificate), or set tls.mode = "prefer" if an unencrypted connection is '
        "acceptable.",
    )


def handshake_failed(error: ssl.SSLError, settings: ConnectSettings) -> TlsError:
    if isinstance(error, ssl.SSLCertVerificationError):
        wrong_name = error.verify_code in _NAME_MISMATCH_CODES
        return (another_name if wrong_name else not_trusted)(settings, error.verify_message)
    if "ALERT" in (error.reason or ""):
        return alerted(settings, error.reason)
    return TlsError(
        f"TLS handshake with the server at {settings.address} failed",
        detail=str(error.reason or error),
        hint="Check that the server accepts TLS 1.2 or newer, and that no proxy on the way changes the connection.",
    )


def another_name(settings: ConnectSettings, detail: str) -> TlsError:
    return TlsError(
        f"certificate of the server at {settings.address} is for another host name",
        detail=detail,
        hint="Connect by the name the certificate carries, or set tls.mode = "
        '"verify-ca" with tls.trusted_root_certs, to accept any name that this root has signed.',
    )


def not_trusted(settings: ConnectSettings, detail: str) -> TlsError:
    return TlsError(
        f"certificate of the server at {settings.address} is not trusted",
        detail=detail,
        hint="Give tls.trusted_root_certs the certificate of the authority that signed the server's: "
        "a path or PEM text.",
    )


def alerted(settings: ConnectSettings, detail: str) -> TlsError:
    """The server ended the TLS handshake. With a client certificate, that is most likely the reason."""
    return TlsError(
        f"server at {settings.address} ended the TLS handshake",
        detail=detail,
        hint="Check that an authority in the server's ssl_ca_file signed tls.client_cert and that it has not expired."
        if settings.tls.client_cert is not None
        else "Check that the server accepts TLS 1.2 or newer; its log has the reason.",
    )
