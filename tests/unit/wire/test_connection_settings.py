"""Settings are values: they travel, they compare, and they don't tell secrets."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.config import PgConnectionConfig
from headwater.errors import ConfigError
from headwater.secret import Secret
from headwater.wire.settings import ConnectSettings, TargetSessionAttrs, split_hosts
from headwater.wire.tls_config import TlsConfig, TlsMode

SETTINGS = ConnectSettings("db.example.com", 5432, "shop", "headwater", Secret("hunter2"))


@pytest.mark.invariant(16)
def test_a_password_shows_in_no_representation() -> None:
    for text in (
        repr(SETTINGS),
        str(SETTINGS),
        f"{SETTINGS.password}",
        repr(SETTINGS.password),
        f"{SETTINGS.password!s:>9}",
    ):
        assert "hunter2" not in text


def test_settings_survive_pickling() -> None:
    again = pickle.loads(pickle.dumps(SETTINGS))
    assert again == SETTINGS
    assert again.password is not None
    assert again.password.reveal() == "hunter2"


def test_secrets_compare_by_content() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1


def test_conninfo_is_what_libpq_understands() -> None:
    assert SETTINGS.conninfo() == {
        "host": "db.example.com",
        "port": 5432,
        "dbname": "shop",
        "user": "headwater",
        "password": "hunter2",
        "application_name": "headwater",
        "connect_timeout": 10,
        "sslmode": "prefer",
        "sslcertmode": "disable",
        "gssencmode": "disable",
        "require_auth": "!password,!md5",
        "keepalives": 1,
        "keepalives_idle": 30,
        "keepalives_interval": 30,
        "keepalives_count": 3,
    }


def test_roots_given_as_text_become_a_file_for_libpq() -> None:
    pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    settings = replace(SETTINGS, tls=TlsConfig(mode=TlsMode.VERIFY_FULL, trusted_root_certs=pem))
    path = settings.conninfo()["sslrootcert"]
    assert Path(str(path)).read_text() == pem
    assert settings.conninfo()["sslrootcert"] == path


def test_roots_given_as_a_path_stay_a_path() -> None:
    settings = replace(SETTINGS, tls=TlsConfig(mode=TlsMode.VERIFY_CA, trusted_root_certs="/etc/roots.pem"))
    assert settings.conninfo()["sslrootcert"] == "/etc/roots.pem"


@pytest.mark.parametrize(
    ("host", "address"),
    [("db", "db:5432"), ("::1", "[::1]:5432"), ("/run/postgresql", "/run/postgresql/.s.PGSQL.5432")],
)
def test_the_address_in_errors_is_where_we_connect(host: str, address: str) -> None:
    assert replace(SETTINGS, host=host).address == address


@pytest.mark.parametrize(
    ("host", "places"),
    [
        ("db", [("db", 5432)]),
        ("db:5433", [("db", 5433)]),
        ("::1", [("::1", 5432)]),
        ("[::1]:5433", [("::1", 5433)]),
        ("[fe80::1%eth0]", [("fe80::1%eth0", 5432)]),
        ("a, b:5433 ,[::1]:5434,10.0.0.1", [("a", 5432), ("b", 5433), ("::1", 5434), ("10.0.0.1", 5432)]),
        ("/run/postgresql,db", [("/run/postgresql", 5432), ("db", 5432)]),
    ],
)
def test_hosts_may_be_several_each_with_a_port_of_its_own(host: str, places: list[tuple[str, int]]) -> None:
    assert list(split_hosts(host, 5432)) == places
    servers = replace(SETTINGS, host=host).each_host()
    assert [(server.host, server.port) for server in servers] == places
    assert [server.password for server in servers] == [SETTINGS.password] * len(places)


@pytest.mark.parametrize("host", ["a,", ",", "a:b", "a:", "a:1:2", "[::1", "db:0", "db:65536", "db:5432,x y:1:"])
def test_a_host_that_cannot_be_read_is_a_mistake_of_the_settings(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PgConnectionConfig(host=host, name="shop", username="reader").validate()
    assert caught.value.detail.startswith("host: ")


def test_of_several_hosts_the_primary_is_wanted_by_default() -> None:
    assert SETTINGS.wanted_session is TargetSessionAttrs.ANY
    several = replace(SETTINGS, host="a,b")
    assert several.wanted_session is TargetSessionAttrs.PRIMARY
    assert {server.wanted_session for server in several.each_host()} == {TargetSessionAttrs.PRIMARY}
    assert several.address == "a:5432, b:5432"
    chosen = replace(several, target_session_attrs=TargetSessionAttrs.ANY)
    assert chosen.wanted_session is TargetSessionAttrs.ANY


@pytest.mark.parametrize(
    ("host", "mode", "may"),
    [
        ("db", TlsMode.DISABLE, False),
        ("db", TlsMode.PREFER, False),
        ("db", TlsMode.REQUIRE, False),
        ("db", TlsMode.VERIFY_CA, True),
        ("db", TlsMode.VERIFY_FULL, True),
        ("10.0.0.1", TlsMode.PREFER, False),
        ("localhost", TlsMode.DISABLE, True),
        ("127.0.0.9", TlsMode.DISABLE, True),
        ("::1", TlsMode.DISABLE, True),
        ("/run/postgresql", TlsMode.DISABLE, True),
    ],
)
def test_a_password_goes_in_clear_text_only_to_a_verified_server_or_by_a_local_connection(
    host: str, mode: TlsMode, may: bool
) -> None:
    settings = replace(SETTINGS, host=host, tls=TlsConfig(mode=mode))
    assert settings.may_send_cleartext_password is may
    assert ("require_auth" in settings.conninfo()) is not may
    assert replace(settings, allow_cleartext_password=True).may_send_cleartext_password


@pytest.mark.invariant(16)
def test_a_key_given_as_text_lies_in_memory_closed_to_others_and_shows_in_no_representation() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\n"
    tls = TlsConfig(
        mode=TlsMode.REQUIRE,
        trusted_root_certs=None,
        client_cert="/etc/client.crt",
        client_key=Secret(key),
        client_key_password=Secret("hunter3"),
    )
    settings = replace(SETTINGS, tls=tls)
    info = settings.conninfo()
    assert (info["sslcert"], info["sslpassword"]) == ("/etc/client.crt", "hunter3")
    path = Path(str(info["sslkey"]))
    assert path.read_text() == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_nlink == 0
    assert "hunter" not in repr(settings)
    assert pickle.loads(pickle.dumps(settings)) == settings
