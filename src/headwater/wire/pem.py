"""Certificates and keys, given as a path or as text, in the one form that OpenSSL and libpq take: a path.

Text becomes a file in memory, never one on disk: it ends with the process, however that ends.
"""

from __future__ import annotations

import os
import ssl
from functools import cache
from pathlib import Path

_MARK = "-----BEGIN "


def is_pem(given: str) -> bool:
    """Whether this is PEM text, and not the path of a file that holds it."""
    return _MARK in given


def pem_path(given: str) -> str:
    return _in_memory(given) if is_pem(given) else given


def pem_text(given: str) -> str:
    """The text itself; raises OSError or ValueError where the file cannot be read."""
    return given if is_pem(given) else Path(given).read_text()


def system_root_certs() -> str:
    """A file where there is one: a psycopg that bundles OpenSSL looks for "system" where its builder had it, and libpq
    refuses "system" together with verify-ca."""
    paths = ssl.get_default_verify_paths()
    candidates = [paths.cafile, f"{paths.capath}/ca-certificates.crt" if paths.capath else None]
    return next((path for path in candidates if path is not None and Path(path).is_file()), "system")


@cache
def _in_memory(text: str) -> str:
    # Stays open: libpq reads it again for each connection. One for each text, and settings have few.
    descriptor = os.memfd_create("headwater-pem")
    # libpq refuses a key that others could read.
    os.fchmod(descriptor, 0o600)
    with open(descriptor, "w", closefd=False) as file:
        file.write(text)
    return f"/proc/self/fd/{descriptor}"
