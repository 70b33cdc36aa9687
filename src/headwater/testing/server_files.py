"""The configuration files of an embedded server: settings, who may connect, certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.testing.runtime import ServerUser

TRUSTED_SOCKET = "local all,replication all trust"
DEFAULT_HBA = (TRUSTED_SOCKET, "host all,replication all 127.0.0.1/32 scram-sha-256")

# Lost on a crash of the machine, kept on a crash of the server: a test server needs no more.
_DEFAULTS = {
    "wal_level": "logical",
    "max_wal_senders": "40",
    "max_replication_slots": "40",
    "max_connections": "200",
    "max_prepared_transactions": "10",
    "shared_buffers": "128MB",
    "fsync": "off",
    "full_page_writes": "off",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "1h",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM texts: the server's certificate and key, and the authority that it trusts if clients need a certificate."""

    certificate: str
    key: str
    client_roots: str | None = None


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """Those in a data directory; all belong to the user that the server runs as."""

    user: ServerUser
    data: Path
    addresses: Mapping[str, str]
    """The settings that say where the server listens."""

    def configure(self, settings: Mapping[str, str], tls: ServerTls | None) -> None:
        chosen = {**_DEFAULTS, **self.addresses}
        if tls is not None:
            chosen |= {"ssl": "on", "ssl_cert_file": "server.crt", "ssl_key_file": "server.key"}
            self._write("server.crt", tls.certificate)
            self._write("server.key", tls.key)
            if tls.client_roots is not None:
                chosen["ssl_ca_file"] = "roots.crt"
                self._write("roots.crt", tls.client_roots)
        lines = [f"{name} = '{value.replace(chr(39), chr(39) * 2)}'" for name, value in {**chosen, **settings}.items()]
        # In a file of its own: used again, a directory's settings must not pile up.
        self._write("headwater.conf", "\n".join([*lines, ""]))
        main = self.data / "postgresql.conf"
        if "include 'headwater.conf'" not in main.read_text():
            with open(main, "a") as file:
                file.write("include 'headwater.conf'\n")

    def write_hba(self, lines: Sequence[str]) -> None:
        self._write("pg_hba.conf", "\n".join([*lines, ""]))

    def _write(self, name: str, content: str) -> None:
        path = self.data / name
        path.write_text(content)
        # The server accepts a private key only from its own user, closed to others.
        path.chmod(0o600)
        self.user.own(path)
