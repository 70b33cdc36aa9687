"""Certificates that trustme does not make: signed by themselves, with a key of any kind."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from headwater.testing.server_files import ServerTls


def without_hash(kind: type[Ed25519PrivateKey] | type[Ed448PrivateKey], host: str = "localhost") -> ServerTls:
    """For a key whose signatures name no hash."""
    key = kind.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return ServerTls(built.public_bytes(Encoding.PEM).decode(), pem.decode())


def server_context(tls: ServerTls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with TemporaryDirectory() as directory:
        cert, key = Path(directory, "cert"), Path(directory, "key")
        cert.write_text(tls.certificate)
        key.write_text(tls.key)
        context.load_cert_chain(cert, key)
    return context
