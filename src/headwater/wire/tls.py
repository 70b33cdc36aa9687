"""TLS as libpq's sslmode means it, over memory buffers.

The socket stays a plain non-blocking one and OpenSSL works on bytes we hand it. So one wait serves both kinds of
connection (no `pending()` to forget beside a select), and a large read feeds many TLS records at once, where an
`SSLSocket` makes two system calls for each record, which for a walsender means two for each change.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from headwater.errors import TlsError
from headwater.wire.settings import ConnectSettings, TlsMode

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
                    break  # a last word and the end may come in one piece; the next call meets the end again
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
    context.check_hostname = tls.mode is TlsMode.VERIFY_FULL
    if not tls.verifies:
        context.verify_mode = ssl.CERT_NONE
        return context
    context.verify_mode = ssl.CERT_REQUIRED
    if tls.root_certs is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        return context
    try:
        pem = tls.root_certs if tls.root_certs_are_text else Path(tls.root_certs).read_text()
        context.load_verify_locations(cadata=pem)
    except (OSError, ValueError, ssl.SSLError) as error:
        where = "text" if tls.root_certs_are_text else f"file {tls.root_certs}"
        raise TlsError(
            "trusted root certificates could not be loaded",
            detail=f"{where}: {error}",
            hint="Give tls.root_certs the path of a readable PEM file, or the PEM text itself.",
        ) from error
    return context


def refused(settings: ConnectSettings) -> TlsError:
    return TlsError(
        f"server at {settings.address} does not offer TLS",
        detail=f"tls.mode is {settings.tls.mode}; the server answered the request for TLS with no",
        hint='Turn TLS on at the server (ssl = on, a certificate), or set tls.mode = "prefer" if plain text is fine.',
    )


def handshake_failed(error: ssl.SSLError, settings: ConnectSettings) -> TlsError:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _NAME_MISMATCH_CODES:
            return TlsError(
                f"certificate of the server at {settings.address} is for another host name",
                detail=error.verify_message,
                hint="Connect by the name the certificate carries, or set tls.mode = "
                '"verify-ca" to accept any name that the trusted root has signed.',
            )
        return TlsError(
            f"certificate of the server at {settings.address} is not trusted",
            detail=error.verify_message,
            hint="Give tls.root_certs the certificate of the authority that signed the server's: a path or PEM text.",
        )
    return TlsError(
        f"TLS handshake with the server at {settings.address} failed",
        detail=str(error.reason or error),
        hint="Check that the server accepts TLS 1.2 or newer, and that nothing on the way rewrites the connection.",
    )
