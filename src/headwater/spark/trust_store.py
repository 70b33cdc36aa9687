"""The machine's certificate authorities, in the form Java reads.

Only for a Java that brings its own list: jars are fetched through it, and behind a company's proxy that list doesn't
know the proxy's authority, while the machine's does.
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import struct
from pathlib import Path

from headwater.cache import cache_directory, install

# Java asks for one to check a store's digest; it protects nothing, for the store holds nothing secret.
PASSWORD = "changeit"

_MAGIC = 0xFEEDFEED
_VERSION = 2
_TRUSTED_CERTIFICATE = 2
# The constant that the format mixes into its digest, beside the password in UTF-16.
_DIGEST_SALT = b"Mighty Aphrodite"
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem")


def machine_trust_store() -> Path | None:
    """A key store file with the authorities that the machine trusts, or None if it has no list of them."""
    bundle = _bundle()
    if bundle is None:
        return None
    content = key_store([ssl.PEM_cert_to_DER_cert(pem) for pem in _PEM.findall(bundle)])
    name = hashlib.sha256(content).hexdigest()[:16]
    directory = install(
        cache_directory() / "trust" / name, lambda target: (target / "authorities.jks").write_bytes(content)
    )
    return directory / "authorities.jks"


def _bundle() -> str | None:
    configured = (os.environ.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().cafile)
    for path in (*configured, *_BUNDLES):
        if path and Path(path).is_file():
            return Path(path).read_text(errors="replace")
    return None


def key_store(certificates: list[bytes]) -> bytes:
    """A Java key store ("JKS") of trusted certificates, each in DER."""
    body = struct.pack(">III", _MAGIC, _VERSION, len(certificates))
    for number, der in enumerate(certificates):
        body += struct.pack(">I", _TRUSTED_CERTIFICATE) + _text(f"authority-{number}")
        body += struct.pack(">Q", 0) + _text("X.509") + struct.pack(">I", len(der)) + der
    return body + hashlib.sha1(PASSWORD.encode("utf-16-be") + _DIGEST_SALT + body).digest()


def _text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()
