"""Settings that would protect less than they seem to are refused before anything is connected to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.config import PgConnectionConfig, TlsConfig
from headwater.errors import ConfigError
from headwater.secret import Secret
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls_config import TlsMode

SETTINGS = ConnectSettings("db.example.com", 5432, "shop", "headwater", Secret("hunter2"))


def connection(tls: TlsConfig) -> PgConnectionConfig:
    return PgConnectionConfig(host="db", name="shop", username="reader", tls=tls)


@pytest.mark.parametrize("roots", [None, ""])
def test_verify_ca_with_the_roots_of_the_system_is_a_mistake(roots: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        connection(TlsConfig(mode=TlsMode.VERIFY_CA, trusted_root_certs=roots)).validate()
    assert caught.value.message
    assert caught.value.detail.startswith("tls.trusted_root_certs: missing")
    assert "any host" in caught.value.detail
    assert 'mode = "verify-full"' in caught.value.detail
    assert caught.value.hint


@pytest.mark.parametrize(
    "tls",
    [
        TlsConfig(mode=TlsMode.VERIFY_CA, trusted_root_certs="roots.pem"),
        TlsConfig(mode=TlsMode.VERIFY_FULL),
        TlsConfig(enabled=True),
        TlsConfig(mode=TlsMode.REQUIRE),
        TlsConfig(),
    ],
)
def test_other_modes_need_no_roots_of_their_own(tls: TlsConfig) -> None:
    connection(tls).validate()


@pytest.mark.parametrize(
    ("cleartext", "md5", "refused"),
    [(False, False, "!password,!md5"), (False, True, "!password"), (True, False, None), (True, True, None)],
)
def test_libpq_gets_the_list_of_methods_to_refuse(cleartext: bool, md5: bool, refused: str | None) -> None:
    settings = replace(SETTINGS, allow_cleartext_password=cleartext, allow_md5_password=md5)
    for mode in (TlsMode.PREFER, TlsMode.REQUIRE):
        assert replace(settings, tls=TlsConfig(mode=mode)).conninfo().get("require_auth") == refused
    verified = replace(settings, tls=TlsConfig(mode=TlsMode.VERIFY_FULL))
    assert "require_auth" not in verified.conninfo()


def test_a_choice_in_the_settings_reaches_the_connection() -> None:
    given = replace(connection(TlsConfig()), allow_md5_password=True).connect_settings()
    assert given.may_send_md5_password
    assert not given.may_send_cleartext_password
