"""What a server that is not the one we mean gets from us, for each way a session is opened: nothing it could use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import trustme

from headwater.errors import AuthenticationError
from headwater.testing.postgres import TRUSTED_SOCKET, PostgresServer, ServerTls
from headwater.wire.settings import ConnectSettings, Secret, TlsMode, TlsSettings
from tests.integration.ways import Ask, each_way

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


def settings_of(server: PostgresServer, role: str, tls: TlsSettings, host: str = ELSEWHERE) -> ConnectSettings:
    return server.settings(username=role, password=Secret(PASSWORD), host=host, tls=tls)


@each_way
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
    settings = settings_of(server, role, TlsSettings(mode))
    with pytest.raises(AuthenticationError, match=asked) as caught:
        ask(settings, WHO)
    assert "nothing was sent" in caught.value.detail
    assert f"{choice} = true" in caught.value.hint
    assert PASSWORD not in str(caught.value)
    assert ask(replace(settings, **{choice: True}), WHO) == role


@each_way
@pytest.mark.parametrize("role", ["by_password", "by_md5"])
def test_a_server_that_is_known_gets_what_it_asks_for(
    server: PostgresServer, authority: trustme.CA, ask: Ask, role: str
) -> None:
    trusted = roots(authority)
    assert ask(settings_of(server, role, TlsSettings(TlsMode.REQUIRE, trusted)), WHO) == role
    assert ask(settings_of(server, role, TlsSettings(TlsMode.VERIFY_CA, trusted)), WHO) == role
    assert ask(settings_of(server, role, TlsSettings(TlsMode.VERIFY_FULL, trusted), "localhost"), WHO) == role
    assert ask(settings_of(server, role, TlsSettings(TlsMode.DISABLE), "127.0.0.1"), WHO) == role
    assert ask(settings_of(server, role, TlsSettings(), server.host), WHO) == role


@each_way
@pytest.mark.parametrize("role", ["by_scram", "by_cert", "by_trust"])
def test_methods_that_give_the_password_to_no_server_go_on_without_verification(
    server: PostgresServer, authority: trustme.CA, ask: Ask, role: str
) -> None:
    shown = authority.issue_cert("client@example.com", common_name=role)
    key = Secret(shown.private_key_pem.bytes().decode())
    tls = TlsSettings(TlsMode.REQUIRE, None, shown.cert_chain_pems[0].bytes().decode(), key)
    assert ask(settings_of(server, role, tls), WHO) == role
