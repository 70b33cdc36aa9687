"""What binds a SCRAM exchange to the TLS connection it runs in: the hash of the server's certificate (RFC 5929).

The hash is the one of the certificate's signature. Ed25519 and Ed448 name none, the RFC says nothing about them, and
neither libpq nor the server has a binding for them: SCRAM-SHA-256-PLUS fails there, on the side that computes the hash first.
"""

from __future__ import annotations

import ssl

from asn1crypto.x509 import Certificate
from scramp import ScramException
from scramp.core import CBindData

TYPE = "tls-server-end-point"
_WITHOUT_HASH = frozenset({"ed25519", "ed448"})


def binding_of(tls_object: ssl.SSLObject) -> bytes | None:
    """None where the certificate has no binding of this kind."""
    certificate = tls_object.getpeercert(binary_form=True)
    if certificate is None:
        return None
    try:
        algorithm = Certificate.load(certificate)["signature_algorithm"]["algorithm"].native
        # scramp would take SHA-512 for Ed25519, which no Postgres does, and fail with Ed448.
        return None if algorithm in _WITHOUT_HASH else bytes(CBindData.from_der(certificate))
    except (ScramException, ValueError, TypeError):
        return None
