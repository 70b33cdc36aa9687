"""How to reach a Postgres server, as values that can travel to an executor.

Both clients are fed from here: our own connection takes the settings as they are, psycopg takes `conninfo()`. Nothing
in this module opens a connection, and no `repr` shows a password.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from threading import Event
from typing import Annotated, Any

from headwater.secret import Secret
from headwater.setting_rules import Checked, Setting
from headwater.wire.pem import pem_path, system_root_certs
from headwater.wire.tls_config import TlsConfig

_STOPPING_CONNECT_SECONDS = 5.0
_WITH_PORT = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^:\[\]]+))(?::(?P<port>\d+))?")


class TargetSessionAttrs(StrEnum):
    """libpq's target_session_attrs: which of several servers is acceptable."""

    ANY = "any"
    READ_WRITE = "read-write"
    READ_ONLY = "read-only"
    PRIMARY = "primary"
    STANDBY = "standby"
    PREFER_STANDBY = "prefer-standby"


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpKeepaliveConfig(Checked):
    """A dead peer is noticed after about idle + interval * retries seconds."""

    idle_seconds: Annotated[int, Setting("Silence before the first probe.", above=0)] = 30
    interval_seconds: Annotated[int, Setting("Time between probes.", above=0)] = 30
    retries: Annotated[int, Setting("Unanswered probes before the connection counts as dead.", above=0)] = 3


@dataclass(frozen=True, slots=True)
class ConnectSettings:
    """One database, one role, and one server, or several that are tried in order: `host` is then a list with commas.

    A host that starts with "/" is the directory of a Unix socket.
    """

    host: str
    port: int
    database: str
    username: str
    password: Secret | None = None
    tls: TlsConfig = field(default_factory=TlsConfig)
    keepalive: TcpKeepaliveConfig = field(default_factory=TcpKeepaliveConfig)
    application_name: str = "headwater"
    connect_timeout_seconds: float = 10.0
    """For each address of each server of the list."""
    answer_timeout_seconds: float = 60.0
    """How long an open session may send nothing when an answer is due; see `wire.patience`."""
    interrupt: Event | None = field(default=None, compare=False, repr=False)
    """The stop of the run that opens sessions with these settings: once it is set, none is waited for long. Is not pickled with
    the settings."""
    target_session_attrs: TargetSessionAttrs | None = None
    """None: any server if there is one; of several the primary, since a slot is on one server only."""
    allow_cleartext_password: bool = False
    allow_md5_password: bool = False
    hostaddr: str | None = None
    """The one of the host's addresses that is tried; None until the name is looked up, and not a user's to set."""

    def __getstate__(self) -> list[object]:
        # For the __setstate__ that dataclasses make: the values in the order of the fields.
        return [None if each.name == "interrupt" else getattr(self, each.name) for each in fields(self)]

    def in_a_hurry(self) -> ConnectSettings:
        """The same, with less time to connect once the run was asked to stop."""
        if self.interrupt is None or not self.interrupt.is_set():
            return self
        return replace(self, connect_timeout_seconds=min(self.connect_timeout_seconds, _STOPPING_CONNECT_SECONDS))

    def each_host(self) -> tuple[ConnectSettings, ...]:
        """The same settings for each single server, in order."""
        places = split_hosts(self.host, self.port)
        if places == ((self.host, self.port),):
            return (self,)
        wanted = self.wanted_session
        return tuple(replace(self, host=host, port=port, target_session_attrs=wanted) for host, port in places)

    @property
    def wanted_session(self) -> TargetSessionAttrs:
        if self.target_session_attrs is not None:
            return self.target_session_attrs
        return TargetSessionAttrs.PRIMARY if "," in self.host else TargetSessionAttrs.ANY

    @property
    def is_unix_socket(self) -> bool:
        return self.host.startswith("/")

    @property
    def socket_path(self) -> str:
        return f"{self.host.rstrip('/')}/.s.PGSQL.{self.port}"

    @property
    def address(self) -> str:
        """What an error may say about where we connected: never a user's password, never a connection string."""
        if "," in self.host:
            return ", ".join(one.address for one in self.each_host())
        if self.is_unix_socket:
            return self.socket_path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def knows_the_server(self) -> bool:
        """Whether only the server that is meant can be at the other end.

        TLS alone is not enough: `prefer` and `require` take any certificate, so a man in the middle can show one of
        his own and ask for the password.
        """
        if self.is_unix_socket or self.tls.verifies:
            return True
        return _is_loopback(self.host) and (self.hostaddr is None or _is_loopback(self.hostaddr))

    @property
    def may_send_cleartext_password(self) -> bool:
        """Whether a server that asks for the password itself gets it: where no other can be asking, or by choice."""
        return self.knows_the_server or self.allow_cleartext_password

    @property
    def may_send_md5_password(self) -> bool:
        """The same for its MD5 hash, from which the password is found by trying: billions a second on one card."""
        return self.may_send_cleartext_password or self.allow_md5_password

    def conninfo(self) -> dict[str, Any]:
        """Keyword arguments for `psycopg.connect`, for one server. Holds secrets in clear: pass it on, never log it."""
        arguments: dict[str, str | int] = {
            "host": self.host,
            "port": self.port,
            "dbname": self.database,
            "user": self.username,
            "application_name": self.application_name,
            # libpq counts whole seconds and takes 1 for 2.
            "connect_timeout": max(2, round(self.connect_timeout_seconds)),
            "sslmode": str(self.tls.sslmode),
            # Ours has no GSS, and both ways to connect are to be protected alike.
            "gssencmode": "disable",
            "keepalives": 1,
            "keepalives_idle": self.keepalive.idle_seconds,
            "keepalives_interval": self.keepalive.interval_seconds,
            "keepalives_count": self.keepalive.retries,
        }
        if self.hostaddr is not None:
            arguments["hostaddr"] = self.hostaddr
        if self.password is not None:
            arguments["password"] = self.password.reveal()
        # A list of what is refused leaves the rest allowed: SCRAM, certificates, GSS, and trust, which sends nothing.
        allowed = {"!password": self.may_send_cleartext_password, "!md5": self.may_send_md5_password}
        if refused := [method for method, may in allowed.items() if not may]:
            arguments["require_auth"] = ",".join(refused)
        if self.tls.verifies:
            roots = self.tls.root_certs
            arguments["sslrootcert"] = pem_path(roots) if roots is not None else system_root_certs()
        return arguments | self._client_certificate()

    def _client_certificate(self) -> dict[str, str | int]:
        tls = self.tls
        if tls.client_cert is None or tls.client_key is None:
            # libpq would show what lies in ~/.postgresql, and our own connection would not.
            return {"sslcertmode": "disable"}
        found: dict[str, str | int] = {
            "sslcert": pem_path(tls.client_cert),
            "sslkey": pem_path(tls.client_key.reveal()),
        }
        if tls.client_key_password is not None:
            found["sslpassword"] = tls.client_key_password.reveal()
        return found


def split_hosts(host: str, port: int) -> tuple[tuple[str, int], ...]:
    """The servers of "a,b:5433,[::1]:5434", each with its own port or else `port`. Raises ValueError."""
    return tuple(_place(one.strip(), port) for one in host.split(","))


def _place(text: str, port: int) -> tuple[str, int]:
    if not text:
        raise ValueError("a host in the list is empty")
    if text.startswith("/") or _is_address(text):
        return text, port
    found = _WITH_PORT.fullmatch(text)
    if found is None:
        raise ValueError(f'expected a name, an address or "host:port" (IPv6 as "[::1]:5432"), found "{text}"')
    own = int(found["port"] or port)
    if not 1 <= own <= 65535:
        raise ValueError(f'the port of "{text}" must be at least 1 and at most 65535')
    return found["bracketed"] or found["plain"], own


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
