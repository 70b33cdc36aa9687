"""Passwords of every kind under every method, for each way a session is opened."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import trustme
from psycopg import sql

from headwater.errors import AuthenticationError
from headwater.secret import Secret
from headwater.testing.postgres import PostgresServer
from headwater.testing.server_files import TRUSTED_SOCKET, ServerTls
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls_config import TlsConfig, TlsMode
from tests.integration.connection_kinds import Ask, by_psycopg, by_wire, each_connection_kind
from tests.integration.tls_relay import tls_relay

WHO = "select current_user::text"
# getaddrinfo takes it for 127.0.0.1, and we don't know it for loopback: as good as a host elsewhere.
ELSEWHERE = "127.1"
HBA = (
    TRUSTED_SOCKET,
    *(
        f"host all,replication by_{method.replace('-', '_')} all {method}"
        for method in ("scram-sha-256", "md5", "password")
    ),
)

ODD = {
    "quotes": """it's "quoted" `so`""",
    "backslashes": "C:\\dir\\'\\\\",
    "percent and equals": "%20%s%%=a=b&c?d#e@f:g/h",
    "dollars": "$1 ${HOME} $$",
    "leading and trailing spaces": "  in the middle  ",
    "only spaces": "   ",
    "newline and tab": "first\nsecond\tthird\r\n",
    "control characters": "\x01\x1b[31m\x7f",
    "comma, as SCRAM separates": "n=user,r=nonce,=2C=3D",
    "unicode": "påsswørd 密碼 пароль 🗝",
    "composed": "\u00e9",
    "decomposed": "e\u0301",
    "compatibility forms": "\ufb01\u2168\u00aa",
    "a soft hyphen": "I\u00adX",
    "only what is mapped to nothing": "\u00ad\u200d",
    "spaces beyond ASCII": "a\u00a0b\u2003c\u3000d",
    "a zero width space, which is both": "a\u200bb",
    "right to left": "\u0627\u0644\u0633\u0631",
    "right to left, mixed": "a\u0627b",
    "forbidden by SASLprep": "a\u0007\u00e9\u0085",
    "unassigned in Unicode 3.2": "\u0221\u1f600 \u20bf",
    "private use": "\ue000secret",
    "looks like a verifier": "md5 is not one",
    "one character": "x",
    "a thousand characters": "\u00fcber lang " * 100,
}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def servers(authority: trustme.CA) -> Iterator[Callable[[int], PostgresServer]]:
    shown = authority.issue_cert("localhost")
    tls = ServerTls(shown.cert_chain_pems[0].bytes().decode(), shown.private_key_pem.bytes().decode())
    with ExitStack() as stack:

        @cache
        def start(version: int) -> PostgresServer:
            server = stack.enter_context(PostgresServer.start(version=version, tls=tls, hba=HBA))
            with server.connect() as connection:
                connection.execute(
                    "create role by_scram_sha_256 login replication; create role by_md5 login replication"
                )
                connection.execute("create role by_password login replication")
            return server

        yield start


@pytest.fixture
def server(servers: Callable[[int], PostgresServer], pg_version: int) -> PostgresServer:
    return servers(pg_version)


def set_password(server: PostgresServer, method: str, password: str) -> ConnectSettings:
    role = f"by_{method.replace('-', '_')}"
    with server.connect() as connection:
        connection.execute(f"set password_encryption = '{'md5' if method == 'md5' else 'scram-sha-256'}'")
        connection.execute(sql.SQL("alter role {} password {}").format(sql.Identifier(role), sql.Literal(password)))
        kept = connection.execute("select rolpassword from pg_authid where rolname = %s", [role]).fetchone()
        assert kept is not None
        assert kept[0].startswith("md5" if method == "md5" else "SCRAM-SHA-256$")
    return server.settings(username=role, password=Secret(password), tls=TlsConfig(mode=TlsMode.DISABLE))


@pytest.mark.promise("Passwords with every odd character")
@each_connection_kind
@pytest.mark.parametrize("method", ["scram-sha-256", "md5", "password"])
@pytest.mark.parametrize("password", ODD.values(), ids=ODD.keys())
def test_a_password_may_have_every_odd_character(server: PostgresServer, ask: Ask, method: str, password: str) -> None:
    settings = set_password(server, method, password)
    assert ask(settings, WHO) == settings.username
    # Not that anything would do.
    with pytest.raises(AuthenticationError) as caught:
        ask(replace(settings, password=Secret(password + "x")), WHO)
    if len(password) > 4 and password.strip():
        assert password not in str(caught.value)


@pytest.mark.promise("Passwords with every odd character")
def test_scram_prepares_random_passwords_as_the_server_does(server: PostgresServer) -> None:
    """psycopg does it in the server's own code; a password it is let in with must do for ours."""
    choose = random.Random(4)
    # Of the blocks where the rules differ: spaces, ligatures, Hebrew and Arabic, controls, Hangul, unassigned ones.
    blocks = [(0x20, 0x7E), (0x80, 0x24F), (0x300, 0x36F), (0x590, 0x6FF), (0x1100, 0x11FF), (0x1E00, 0x206F)]
    blocks += [
        (0x2070, 0x218F),
        (0x2F00, 0x30FF),
        (0xAC00, 0xAC40),
        (0xE000, 0xE010),
        (0xF900, 0xFFFD),
        (0x1F600, 0x1F610),
    ]
    for _ in range(80):
        chosen = [choose.choice(blocks) for _ in range(choose.randint(1, 6))]
        password = "".join(chr(choose.randint(*block)) for block in chosen)
        settings = set_password(server, "scram-sha-256", password)
        assert by_psycopg(settings, WHO) == by_wire(settings, WHO) == "by_scram_sha_256", ascii(password)


@pytest.mark.promise("SCRAM, md5 and cleartext, and no password in clear text where others read it")
@pytest.mark.versions
@each_connection_kind
def test_a_clear_text_password_is_sent_only_where_others_cannot_read_it(
    server: PostgresServer, authority: trustme.CA, ask: Ask
) -> None:
    roots = authority.cert_pem.bytes().decode()
    here = set_password(server, "password", "in the clear")
    elsewhere = replace(here, host=ELSEWHERE)
    for mode in (TlsMode.DISABLE, TlsMode.PREFER, TlsMode.REQUIRE):
        with pytest.raises(AuthenticationError, match="asks for the password in clear text") as caught:
            ask(replace(elsewhere, tls=TlsConfig(mode=mode)), WHO)
        assert "nothing was sent" in caught.value.detail
        assert "allow_cleartext_password" in caught.value.hint
        assert "in the clear" not in str(caught.value)
    for allowed in (
        here,
        replace(elsewhere, tls=TlsConfig(mode=TlsMode.REQUIRE, trusted_root_certs=roots)),
        replace(elsewhere, tls=TlsConfig(mode=TlsMode.VERIFY_CA, trusted_root_certs=roots)),
        replace(elsewhere, allow_cleartext_password=True),
    ):
        assert ask(allowed, WHO) == "by_password"


@pytest.mark.promise("SCRAM, md5 and cleartext, and no password in clear text where others read it")
@pytest.mark.versions
@each_connection_kind
@pytest.mark.parametrize("method", ["scram-sha-256", "md5"])
def test_other_methods_need_no_tls_because_they_do_not_send_the_password(
    server: PostgresServer, ask: Ask, method: str
) -> None:
    # That an MD5 hash is sent there at all is a choice.
    settings = replace(set_password(server, method, "kept"), host=ELSEWHERE, allow_md5_password=method == "md5")
    assert ask(settings, WHO) == settings.username


@pytest.mark.promise("SCRAM, md5 and cleartext, and no password in clear text where others read it")
@pytest.mark.versions
@each_connection_kind
def test_scram_notices_who_terminates_tls_on_the_way(server: PostgresServer, ask: Ask) -> None:
    settings = replace(set_password(server, "scram-sha-256", "bound"), tls=TlsConfig(mode=TlsMode.REQUIRE))
    assert ask(settings, WHO) == settings.username
    with tls_relay(server.port) as port, pytest.raises(AuthenticationError, match="does not end at") as caught:
        ask(replace(settings, port=port), WHO)
    assert "verify-full" in caught.value.hint


@pytest.mark.promise("SCRAM, md5 and cleartext, and no password in clear text where others read it")
@pytest.mark.versions
@each_connection_kind
def test_a_password_that_is_asked_for_and_missing_is_reported(server: PostgresServer, ask: Ask) -> None:
    settings = replace(set_password(server, "scram-sha-256", "there is one"), password=None)
    with pytest.raises(AuthenticationError) as caught:
        ask(settings, WHO)
    assert caught.value.detail
    assert "assword" in caught.value.hint
