"""How to reach Postgres, as a user writes it, and its translation into what the wire takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from headwater.config.rules import Checked, Mistake, Setting
from headwater.wire.settings import ConnectSettings, KeepaliveSettings, Secret, TlsMode, TlsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig(Checked):
    mode: Annotated[
        TlsMode | None,
        Setting(
            "How strictly the connection is protected, in libpq's words. Without it `enabled` decides, and without "
            'either it is `"prefer"`.'
        ),
    ] = None
    enabled: Annotated[
        bool | None, Setting('The short form: true is `mode = "verify-full"`, false is `mode = "disable"`.')
    ] = None
    trusted_root_certs: Annotated[
        str | None,
        Setting(
            "Root certificates: the path of a PEM file, or the PEM text. Empty or missing: the system's own.", path=True
        ),
    ] = None

    def conflicts(self) -> Iterator[Mistake]:
        if self.mode is not None and self.enabled is not None and self.enabled == (self.mode is TlsMode.DISABLE):
            yield Mistake("enabled", f'contradicts mode = "{self.mode}"; write only one of them')

    def tls_settings(self) -> TlsSettings:
        mode = self.mode
        if mode is None:
            mode = {None: TlsMode.PREFER, True: TlsMode.VERIFY_FULL, False: TlsMode.DISABLE}[self.enabled]
        return TlsSettings(mode, self.trusted_root_certs or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpKeepaliveConfig(Checked):
    idle_seconds: Annotated[int, Setting("Silence before the first probe.", above=0)] = 30
    interval_seconds: Annotated[int, Setting("Time between probes.", above=0)] = 30
    retries: Annotated[int, Setting("Unanswered probes before the connection counts as dead.", above=0)] = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PgConnectionConfig(Checked):
    what: ClassVar[str] = "the connection settings"

    host: Annotated[
        str,
        Setting("Host name or address; what starts with `/` is the directory of a Unix socket.", not_empty=True),
    ]
    port: Annotated[int, Setting("TCP port.", at_least=1, at_most=65535)] = 5432
    name: Annotated[str, Setting("The database.", not_empty=True)]
    username: Annotated[
        str, Setting("The role; needs REPLICATION, and SELECT on the published tables.", not_empty=True)
    ]
    password: Annotated[
        Secret | None, Setting('The password, best as `{ env = "NAME" }` or `{ file = "path" }`.', not_empty=True)
    ] = None
    tls: Annotated[TlsConfig, Setting("Transport security.")] = field(default_factory=TlsConfig)
    keepalive: Annotated[TcpKeepaliveConfig, Setting("TCP keepalive.")] = field(default_factory=TcpKeepaliveConfig)

    def connect_settings(self, application_name: str = "headwater") -> ConnectSettings:
        return ConnectSettings(
            host=self.host,
            port=self.port,
            database=self.name,
            username=self.username,
            password=self.password,
            tls=self.tls.tls_settings(),
            keepalive=KeepaliveSettings(
                self.keepalive.idle_seconds, self.keepalive.interval_seconds, self.keepalive.retries
            ),
            application_name=application_name,
        )
