"""How to reach Postgres, as a user writes it, and its translation into the settings of `wire`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from headwater.secret import Secret
from headwater.setting_rules import Checked, Mistake, Setting
from headwater.wire.pem import is_pem
from headwater.wire.settings import ConnectSettings, TargetSessionAttrs, TcpKeepaliveConfig, split_hosts
from headwater.wire.tls_config import TlsConfig

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PgConnectionConfig(Checked):
    what: ClassVar[str] = "the connection settings"

    host: Annotated[
        str,
        Setting(
            "Host name or address; a value that starts with `/` is the directory of a Unix socket. Several, separated by commas, "
            'are tried in order; each may have a port of its own: `"db1,db2:5433,[::1]:5434"`.',
            not_empty=True,
        ),
    ]
    port: Annotated[int, Setting("TCP port, unless `host` contains one.", at_least=1, at_most=65535)] = 5432
    name: Annotated[str, Setting("The database.", not_empty=True)]
    username: Annotated[
        str, Setting("The role; needs REPLICATION, and SELECT on the published tables.", not_empty=True)
    ]
    password: Annotated[
        Secret | None, Setting('The password, best as `{ env = "NAME" }` or `{ file = "path" }`.', not_empty=True)
    ] = None
    target_session_attrs: Annotated[
        TargetSessionAttrs | None,
        Setting(
            "Which server is acceptable, as in libpq. Without it: any for one host, the primary for several, since a slot "
            "is on one server only."
        ),
    ] = None
    allow_cleartext_password: Annotated[
        bool,
        Setting(
            "Whether the password is sent in clear text to a server that asks for it, even if the server's certificate is not "
            'verified. It is always sent if the certificate is verified (tls.mode `"verify-full"`, `"verify-ca"`, or '
            '`"require"` with `trusted_root_certs`), on loopback and on a Unix socket. Allows MD5 too.'
        ),
    ] = False
    allow_md5_password: Annotated[
        bool,
        Setting(
            "Whether the password's MD5 hash is sent to a server that asks for it, even if the server's certificate is not "
            "verified. The receiver of the hash can find the password by trying. Better: move the role to `scram-sha-256`."
        ),
    ] = False
    tls: Annotated[TlsConfig, Setting("Transport security.")] = field(default_factory=TlsConfig)
    keepalive: Annotated[TcpKeepaliveConfig, Setting("TCP keepalive.")] = field(default_factory=TcpKeepaliveConfig)
    answer_timeout_ms: Annotated[
        int,
        Setting(
            "How long a server may send nothing when an answer is due. After half of it, Headwater asks the server over a new "
            "connection whether the session is still at work. If it is not, or the server does not answer, Headwater gives the "
            "connection up and connects again. For the replication stream the server's `wal_sender_timeout` counts, if it is "
            "longer. A new connection has 10 s, or this if it is shorter.",
            at_least=1000,
        ),
    ] = 60_000

    def conflicts(self) -> Iterator[Mistake]:
        try:
            split_hosts(self.host, self.port)
        except ValueError as error:
            yield Mistake("host", str(error))

    def secrets(self) -> Iterator[str]:
        """What must never be shown; a key line by line, since one line of it must not be shown either."""
        for secret in (self.password, self.tls.client_key_password):
            if secret is not None:
                yield secret.reveal()
        key = self.tls.client_key.reveal() if self.tls.client_key is not None else ""
        if is_pem(key):
            yield from (line for line in key.splitlines() if not line.startswith("-----"))

    def connect_settings(self, application_name: str = "headwater") -> ConnectSettings:
        return ConnectSettings(
            host=self.host,
            port=self.port,
            database=self.name,
            username=self.username,
            password=self.password,
            tls=self.tls,
            keepalive=self.keepalive,
            application_name=application_name,
            target_session_attrs=self.target_session_attrs,
            connect_timeout_seconds=min(_CONNECT_SECONDS, self.answer_timeout_ms / 1000),
            answer_timeout_seconds=self.answer_timeout_ms / 1000,
            allow_cleartext_password=self.allow_cleartext_password,
            allow_md5_password=self.allow_md5_password,
        )
