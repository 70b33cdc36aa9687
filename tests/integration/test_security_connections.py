"""What a server that is not the one we mean gets from us, for each way a session is opened: nothing it could use."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from headwater.errors import AuthenticationError
from headwater.secret import Secret
from headwater.testing.postgres import PostgresServer
from headwater.testing.server_files import TRUSTED_SOCKET, ServerTls
from headwater.wire.messages import frame
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls_config import TlsConfig, TlsMode
from tests.integration.certificates import server_context, without_hash
from tests.integration.connection_kinds import Ask, each_connection_kind
from tests.integration.tls_relay import tls_relay

WHO = "select current_user::text"
# getaddrinfo takes it for 127.0.0.1, and we don't know it for loopback: as good as a host elsewhere.
ELSEWHERE = "127.1"
PASSWORD = "not for strangers"
HBA = (
    TRUSTED_SOCKET,
    "host all,replication by_password all password",
    "host all,replication by_md5 all md5",
    "host all,replication by_scram all scram-sha-256",
    "hostssl all,replication by_cert all cert",
    "host all,replication by_trust all trust",
)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server(authority: trustme.CA) -> Iterator[PostgresServer]:
    shown = authority.issue_cert("localhost")
    tls = ServerTls(
        shown.cert_chain_pems[0].bytes().decode(), shown.private_key_pem.bytes().decode(), client_roots=roots(authority)
    )
    with PostgresServer.start(tls=tls, hba=HBA) as started:
        with started.connect() as connection:
            for role in ("by_password", "by_md5", "by_scram", "by_cert", "by_trust"):
                connection.execute(f"set password_encryption = '{'md5' if role == 'by_md5' else 'scram-sha-256'}'")
                connection.execute(f"create role {role} login replication password '{PASSWORD}'")
        yield started


def roots(authority: trustme.CA) -> str:
    return authority.cert_pem.bytes().decode()


def settings_of(server: PostgresServer, role: str, tls: TlsConfig, host: str = ELSEWHERE) -> ConnectSettings:
    return server.settings(username=role, password=Secret(PASSWORD), host=host, tls=tls)


@each_connection_kind
@pytest.mark.parametrize("mode", [TlsMode.DISABLE, TlsMode.PREFER, TlsMode.REQUIRE])
@pytest.mark.parametrize(
    ("role", "asked", "choice"),
    [
        ("by_password", "asks for the password in clear text", "allow_cleartext_password"),
        ("by_md5", "asks for the password's MD5 hash", "allow_md5_password"),
    ],
)
def test_a_server_whose_certificate_is_not_verified_gets_neither_the_password_nor_its_md5_hash(
    server: PostgresServer, ask: Ask, mode: TlsMode, role: str, asked: str, choice: str
) -> None:
    settings = settings_of(server, role, TlsConfig(mode=mode))
    with pytest.raises(AuthenticationError, match=asked) as caught:
        ask(settings, WHO)
    assert "nothing was sent" in caught.value.detail
    assert f"{choice} = true" in caught.value.hint
    assert PASSWORD not in str(caught.value)
    chosen: dict[str, Any] = {choice: True}
    assert ask(replace(settings, **chosen), WHO) == role


@each_connection_kind
@pytest.mark.parametrize("role", ["by_password", "by_md5"])
def test_a_server_that_is_known_gets_what_it_asks_for(
    server: PostgresServer, authority: trustme.CA, ask: Ask, role: str
) -> None:
    trusted = roots(authority)
    assert ask(settings_of(server, role, TlsConfig(mode=TlsMode.REQUIRE, trusted_root_certs=trusted)), WHO) == role
    assert ask(settings_of(server, role, TlsConfig(mode=TlsMode.VERIFY_CA, trusted_root_certs=trusted)), WHO) == role
    verified = TlsConfig(mode=TlsMode.VERIFY_FULL, trusted_root_certs=trusted)
    assert ask(settings_of(server, role, verified, "localhost"), WHO) == role
    assert ask(settings_of(server, role, TlsConfig(mode=TlsMode.DISABLE), "127.0.0.1"), WHO) == role
    assert ask(settings_of(server, role, TlsConfig(), server.host), WHO) == role


@each_connection_kind
@pytest.mark.parametrize("role", ["by_scram", "by_cert", "by_trust"])
def test_methods_that_give_the_password_to_no_server_go_on_without_verification(
    server: PostgresServer, authority: trustme.CA, ask: Ask, role: str
) -> None:
    shown = authority.issue_cert("client@example.com", common_name=role)
    key = Secret(shown.private_key_pem.bytes().decode())
    tls = TlsConfig(
        mode=TlsMode.REQUIRE,
        client_cert=shown.cert_chain_pems[0].bytes().decode(),
        client_key=key,
    )
    assert ask(settings_of(server, role, tls), WHO) == role


@each_connection_kind
@pytest.mark.parametrize("kind", [Ed25519PrivateKey, Ed448PrivateKey])
def test_a_certificate_that_scram_cannot_be_bound_to_must_be_verified(
    ask: Ask, kind: type[Ed25519PrivateKey] | type[Ed448PrivateKey]
) -> None:
    shown = without_hash(kind)
    with PostgresServer.start(
        tls=shown, hba=(TRUSTED_SOCKET, "hostssl all,replication all all scram-sha-256")
    ) as server:
        for verified in (TlsMode.REQUIRE, TlsMode.VERIFY_CA, TlsMode.VERIFY_FULL):
            settings = server.settings(
                host="localhost", tls=TlsConfig(mode=verified, trusted_root_certs=shown.certificate)
            )
            assert ask(settings, WHO) == "postgres"
        for unverified in (TlsMode.PREFER, TlsMode.REQUIRE):
            with pytest.raises(AuthenticationError, match="channel binding is not possible") as caught:
                ask(server.settings(host="localhost", tls=TlsConfig(mode=unverified)), WHO)
            assert "Ed25519" in caught.value.detail
            assert "verify-full" in caught.value.hint
        with pytest.raises(AuthenticationError) as wrong:
            ask(replace(settings, password=Secret("wrong")), WHO)
        assert "channel binding" not in str(wrong.value)


@each_connection_kind
@pytest.mark.parametrize("kind", [None, Ed25519PrivateKey, Ed448PrivateKey])
@pytest.mark.parametrize("strips", [False, True], ids=["offers binding", "takes the offer of binding out"])
def test_a_stranger_between_who_shows_a_certificate_of_any_kind_gets_no_session(
    server: PostgresServer,
    ask: Ask,
    kind: type[Ed25519PrivateKey] | type[Ed448PrivateKey] | None,
    strips: bool,
) -> None:
    settings = settings_of(server, "by_scram", TlsConfig(mode=TlsMode.REQUIRE), "localhost")
    assert ask(settings, WHO) == "by_scram"
    shown = None if kind is None else server_context(without_hash(kind))
    relay = tls_relay(server.port, shown, without_channel_binding) if strips else tls_relay(server.port, shown)
    with relay as port, pytest.raises(AuthenticationError) as caught:
        ask(replace(settings, port=port), WHO)
    assert "verify-full" in caught.value.hint
    assert PASSWORD not in str(caught.value)


def without_channel_binding(answer: bytes) -> bytes:
    """The server's offer of SCRAM-SHA-256-PLUS taken away."""
    whole = frame(b"R", struct.pack("!i", 10) + b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0")
    return answer.replace(whole, frame(b"R", struct.pack("!i", 10) + b"SCRAM-SHA-256\0\0"))
