"""How to reach a Postgres server, as values that can travel to an executor.

Both clients are fed from here: our own connection takes the settings as they are, psycopg takes `conninfo()`. Nothing
in this module opens a connection, and no `repr` shows a password.
"""

from __future__ import annotations

import atexit
import shutil
import ssl
import tempfile
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

_PEM_MARK = "-----BEGIN "


class Secret:
    """A string that does not show itself. Whoever needs the text asks with `reveal()`."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret('***')"

    def __str__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return (Secret, (self._text,))


class TlsMode(StrEnum):
    """libpq's sslmode, without `allow`, which protects from nothing."""

    DISABLE = "disable"
    PREFER = "prefer"
    REQUIRE = "require"
    VERIFY_CA = "verify-ca"
    VERIFY_FULL = "verify-full"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """`root_certs` is the path of a PEM file, or the PEM text itself; None means the system's store."""

    mode: TlsMode = TlsMode.PREFER
    root_certs: str | None = None

    @property
    def verifies(self) -> bool:
        """Whether the server's certificate must be signed by a root we trust.

        As in libpq, `require` with roots given verifies like `verify-ca`: whoever names roots wants them used.
        """
        if self.mode is TlsMode.REQUIRE:
            return self.root_certs is not None
        return self.mode in (TlsMode.VERIFY_CA, TlsMode.VERIFY_FULL)

    @property
    def root_certs_are_text(self) -> bool:
        return self.root_certs is not None and _PEM_MARK in self.root_certs


@dataclass(frozen=True, slots=True)
class KeepaliveSettings:
    """TCP keepalive: a dead peer is noticed after about idle + interval * retries seconds."""

    idle_seconds: int = 30
    interval_seconds: int = 30
    retries: int = 3


@dataclass(frozen=True, slots=True)
class ConnectSettings:
    """One server, one database, one role. A `host` that starts with "/" is the directory of a Unix socket."""

    host: str
    port: int
    database: str
    username: str
    password: Secret | None = None
    tls: TlsSettings = field(default_factory=TlsSettings)
    keepalive: KeepaliveSettings = field(default_factory=KeepaliveSettings)
    application_name: str = "headwater"
    connect_timeout_seconds: float = 10.0

    @property
    def is_unix_socket(self) -> bool:
        return self.host.startswith("/")

    @property
    def socket_path(self) -> str:
        return f"{self.host.rstrip('/')}/.s.PGSQL.{self.port}"

    @property
    def address(self) -> str:
        """What an error may say about where we connected: never a user's password, never a connection string."""
        if self.is_unix_socket:
            return self.socket_path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def conninfo(self) -> dict[str, str | int]:
        """Keyword arguments for `psycopg.connect`. Holds the password in clear: pass it on, never log it."""
        arguments: dict[str, str | int] = {
            "host": self.host,
            "port": self.port,
            "dbname": self.database,
            "user": self.username,
            "application_name": self.application_name,
            # libpq counts whole seconds and takes 1 for 2.
            "connect_timeout": max(2, round(self.connect_timeout_seconds)),
            "sslmode": str(self.tls.mode),
            "keepalives": 1,
            "keepalives_idle": self.keepalive.idle_seconds,
            "keepalives_interval": self.keepalive.interval_seconds,
            "keepalives_count": self.keepalive.retries,
        }
        if self.password is not None:
            arguments["password"] = self.password.reveal()
        if self.tls.verifies:
            arguments["sslrootcert"] = _root_certs_path(self.tls)
        return arguments


def _root_certs_path(tls: TlsSettings) -> str:
    if tls.root_certs is None:
        return _system_root_certs()
    return _written_root_certs(tls.root_certs) if tls.root_certs_are_text else tls.root_certs


def _system_root_certs() -> str:
    """A file where there is one: a psycopg that bundles OpenSSL looks for "system" where its builder had it, and libpq
    refuses "system" together with verify-ca."""
    paths = ssl.get_default_verify_paths()
    candidates = [paths.cafile, f"{paths.capath}/ca-certificates.crt" if paths.capath else None]
    return next((path for path in candidates if path is not None and Path(path).is_file()), "system")


@cache
def _written_root_certs(pem: str) -> str:
    # libpq takes roots only from a file. The directory is private and new: a fixed name in a shared one could be
    # planted by somebody else.
    directory = Path(tempfile.mkdtemp(prefix="headwater-roots-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "root.pem"
    path.write_text(pem)
    return str(path)
