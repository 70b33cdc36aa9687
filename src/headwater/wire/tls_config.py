"""How strictly a connection is protected: what a user writes under `[pg_connection.tls]`, and what the wire asks it.

A value: it opens no file, shows no key in its `repr`, and travels to executors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from headwater.secret import Secret
from headwater.setting_rules import Checked, Mistake, Setting


class TlsMode(StrEnum):
    """libpq's sslmode, without `allow`, which gives no protection."""

    DISABLE = "disable"
    PREFER = "prefer"
    REQUIRE = "require"
    VERIFY_CA = "verify-ca"
    VERIFY_FULL = "verify-full"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig(Checked):
    mode: Annotated[
        TlsMode | None,
        Setting('The `sslmode` of libpq. Without it `enabled` decides, and without either it is `"prefer"`.'),
    ] = None
    enabled: Annotated[
        bool | None, Setting('The short form: true is `mode = "verify-full"`, false is `mode = "disable"`.')
    ] = None
    trusted_root_certs: Annotated[
        str | None,
        Setting(
            "Root certificates: the path of a PEM file, or the PEM text. Empty or missing: the system's own, with "
            '`"verify-full"` only.',
            path=True,
        ),
    ] = None
    client_cert: Annotated[
        str | None,
        Setting(
            "The client certificate, for a server that asks for one: the path of a PEM file, or the PEM text.",
            path=True,
        ),
    ] = None
    client_key: Annotated[
        Secret | None,
        Setting(
            "Its private key: the path of a PEM file that only its owner may read, or the PEM text, best as "
            '`{ env = "NAME" }`.',
            path=True,
            not_empty=True,
        ),
    ] = None
    client_key_password: Annotated[
        Secret | None, Setting("The password of the private key, if it is encrypted.", not_empty=True)
    ] = None

    def conflicts(self) -> Iterator[Mistake]:
        if self.mode is not None and self.enabled is not None and self.enabled == (self.mode is TlsMode.DISABLE):
            yield Mistake("enabled", f'contradicts mode = "{self.mode}"; write only one of them')
        if (self.client_cert is None) != (self.client_key is None):
            lacks = "client_key" if self.client_key is None else "client_cert"
            yield Mistake(lacks, "missing; a client certificate and its key belong together")
        if self.client_key_password is not None and self.client_key is None:
            yield Mistake("client_key_password", "given without a client_key that it could decrypt")
        if self.client_cert is not None and self.sslmode is TlsMode.DISABLE:
            yield Mistake("client_cert", "is not used without TLS; set another mode")
        if self.sslmode is TlsMode.VERIFY_CA and not self.trusted_root_certs:
            # The system's roots sign for every owner of a domain, and this mode checks no name; libpq refuses it too.
            yield Mistake(
                "trusted_root_certs",
                'missing; mode = "verify-ca" checks no host name, so the system\'s roots would accept a certificate of any '
                'host; give the root of your own authority, or set mode = "verify-full"',
            )

    @property
    def sslmode(self) -> TlsMode:
        """The mode in force."""
        if self.mode is not None:
            return self.mode
        return {None: TlsMode.PREFER, True: TlsMode.VERIFY_FULL, False: TlsMode.DISABLE}[self.enabled]

    @property
    def root_certs(self) -> str | None:
        """None: the system's own."""
        return self.trusted_root_certs or None

    @property
    def verifies(self) -> bool:
        """Whether the server's certificate must be signed by a root we trust.

        As in libpq, `require` with root certificates given verifies like `verify-ca`.
        """
        if self.sslmode is TlsMode.REQUIRE:
            return self.root_certs is not None
        return self.sslmode in (TlsMode.VERIFY_CA, TlsMode.VERIFY_FULL)
