"""Settings are values: they travel, they compare, and they don't tell secrets."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.wire.settings import ConnectSettings, Secret, TlsMode, TlsSettings

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
        "keepalives": 1,
        "keepalives_idle": 30,
        "keepalives_interval": 30,
        "keepalives_count": 3,
    }


def test_roots_given_as_text_become_a_file_for_libpq() -> None:
    pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    settings = replace(SETTINGS, tls=TlsSettings(TlsMode.VERIFY_FULL, pem))
    path = settings.conninfo()["sslrootcert"]
    assert Path(str(path)).read_text() == pem
    assert settings.conninfo()["sslrootcert"] == path


def test_roots_given_as_a_path_stay_a_path() -> None:
    settings = replace(SETTINGS, tls=TlsSettings(TlsMode.VERIFY_CA, "/etc/roots.pem"))
    assert settings.conninfo()["sslrootcert"] == "/etc/roots.pem"


@pytest.mark.parametrize(
    ("host", "address"),
    [("db", "db:5432"), ("::1", "[::1]:5432"), ("/run/postgresql", "/run/postgresql/.s.PGSQL.5432")],
)
def test_the_address_in_errors_is_where_we_connect(host: str, address: str) -> None:
    assert replace(SETTINGS, host=host).address == address
