"""Settings from TOML: what is taken, and that every mistake is found at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.config import (
    CatalogType,
    DestinationMode,
    InvalidatedSlotBehavior,
    StoreType,
    TableSyncCopyMode,
    TlsMode,
    load_settings,
)
from headwater.errors import ConfigError
from headwater.secret import Secret
from headwater.wire.settings import TargetSessionAttrs

WHOLE = """
id = 1
publication_name = "shop"

[pg_connection]
host = "db.example.com"
name = "shop"
username = "headwater"
password = { env = "SHOP_PASSWORD" }

[pg_connection.tls]
mode = "verify-full"

[destination]
warehouse = "./lake"
"""
ENVIRON = {"SHOP_PASSWORD": "hunter2-hunter2"}


def mistakes(text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(text, ENVIRON if environ is None else environ)
    assert "hunter2" not in str(caught.value)
    return caught.value.detail.splitlines()


def without(*lines: str) -> str:
    text = WHOLE
    for line in lines:
        assert line in text
        text = text.replace(line, "")
    return text


def test_a_file_with_the_required_settings_gets_every_default() -> None:
    settings = load_settings(WHOLE, ENVIRON)
    pipeline = settings.pipeline
    assert (pipeline.id, pipeline.publication_name, pipeline.pg_connection.port) == (1, "shop", 5432)
    assert pipeline.batch.max_fill_ms <= 1000, "a change is visible in about a second"
    assert (pipeline.table_error_retry_delay_ms, pipeline.table_error_retry_max_attempts) == (10_000, 5)
    assert (pipeline.max_table_sync_workers, pipeline.max_copy_connections_per_table) == (4, 4)
    assert pipeline.memory_backpressure is not None
    assert (pipeline.memory_backpressure.activate, pipeline.memory_backpressure.resume) == (0.85, 0.75)
    assert pipeline.invalidated_slot_behavior is InvalidatedSlotBehavior.ERROR
    assert pipeline.run_source_migrations
    assert pipeline.store_connection is pipeline.pg_connection
    assert settings.destination.mode is DestinationMode.MIRROR
    assert settings.destination.catalog.type is CatalogType.SQLITE
    assert (settings.store.type, settings.spark.master) == (StoreType.POSTGRES, "local[*]")


def test_the_example_in_the_documentation_is_valid() -> None:
    document = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    example = document.partition("```toml\n")[2].partition("```")[0]
    assert load_settings(example, ENVIRON).pipeline.publication_name == "shop"


def test_all_mistakes_are_reported_at_once_with_their_dotted_keys() -> None:
    text = without("id = 1\n").replace("host =", "hots =").replace('"verify-full"', '"loose"')
    found = mistakes(
        "max_table_sync_workers = 0\nrun_source_migrations = 1\n"
        + text
        + '\n[batch]\nmax_fill_ms = -1\nmax_bytes = "a lot"\nmemory_budget_ratio = 1.5\n',
        environ={},
    )
    assert found == [
        "id: missing; expected an integer",
        'pg_connection.hots: unknown setting; did you mean "host"?',
        "pg_connection.host: missing; expected a string",
        "pg_connection.password: the environment variable SHOP_PASSWORD is not set; set it in the environment of headwater",
        'pg_connection.tls.mode: expected one of "disable", "prefer", "require", "verify-ca", "verify-full", '
        'found "loose"',
        "batch.max_fill_ms: must be above 0, found -1",
        "batch.memory_budget_ratio: must be above 0 and at most 1, found 1.5",
        'batch.max_bytes: expected an integer, found a string: "a lot"',
        "max_table_sync_workers: must be above 0, found 0",
        "run_source_migrations: expected true or false, found an integer: 1",
    ]


def test_an_empty_file_names_every_required_setting() -> None:
    assert [line.partition(":")[0] for line in mistakes("")] == [
        "id",
        "publication_name",
        "pg_connection.host",
        "pg_connection.name",
        "pg_connection.username",
        "destination.warehouse",
    ]


def test_an_unknown_section_at_the_top_is_refused_with_the_nearest_name() -> None:
    assert mistakes(WHOLE + "[spark_]\n") == ['spark_: unknown setting; did you mean "spark"?']


def test_an_unknown_setting_that_resembles_none_lists_what_is_known() -> None:
    assert mistakes(WHOLE + "[store]\nzzz = 1\n") == ["store.zzz: unknown setting; known here: type"]


def test_true_is_not_a_number_and_a_number_is_not_a_string() -> None:
    found = mistakes(WHOLE.replace("id = 1", "id = true").replace('"shop"\n\n', "7\n\n", 1))
    assert found == [
        "id: expected an integer, found true or false: true",
        "publication_name: expected a string, found an integer: 7",
    ]


def test_a_setting_that_should_be_a_table_is_refused_with_how_to_write_it() -> None:
    assert mistakes("batch = 3\n" + WHOLE) == ["batch: expected a table, written [batch], found something else"]


def test_what_stands_where_a_secret_belongs_is_never_shown() -> None:
    text = WHOLE.replace('{ env = "SHOP_PASSWORD" }', "73573573")
    assert mistakes(text) == ["pg_connection.password: expected a string, found an integer"]


def test_an_empty_password_is_a_mistake() -> None:
    assert mistakes(WHOLE, {"SHOP_PASSWORD": ""}) == ["pg_connection.password: must be not empty"]


def test_secrets_come_from_the_environment_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from a file\n")
    file = tmp_path / "pipeline.toml"
    file.write_text(WHOLE.replace('{ env = "SHOP_PASSWORD" }', '{ file = "password" }'))
    for settings, wanted in (
        (load_settings(WHOLE, ENVIRON), ENVIRON["SHOP_PASSWORD"]),
        (load_settings(file, {}), "from a file"),
    ):
        password = settings.pipeline.pg_connection.password
        assert password is not None
        assert password.reveal() == wanted
        assert wanted not in repr(settings)
        assert list(settings.secrets()) == [wanted]


def test_a_secret_file_that_is_missing_is_one_of_the_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(WHOLE.replace('{ env = "SHOP_PASSWORD" }', '{ file = "nowhere" }').replace("id = 1", "id = 0"))
    with pytest.raises(ConfigError) as caught:
        load_settings(file, {})
    assert caught.value.message == "pipeline.toml has 2 mistakes"
    assert caught.value.detail.splitlines() == [
        "id: must be at least 1 and at most 2147483647, found 0",
        'pg_connection.password: the file "nowhere" cannot be read: No such file or directory',
    ]


def test_a_relative_warehouse_is_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(WHOLE)
    assert load_settings(file, ENVIRON).destination.warehouse == str(tmp_path / "lake")
    file.write_text(
        WHOLE.replace("./lake", "s3://bucket/lake") + '[destination.catalog]\ntype = "rest"\nuri = "http://c"\n'
    )
    assert load_settings(file, ENVIRON).destination.warehouse == "s3://bucket/lake"


def test_the_embedded_catalog_needs_a_local_warehouse() -> None:
    (found,) = mistakes(WHOLE.replace("./lake", "s3://bucket/lake"))
    assert found.startswith("destination.catalog.type:")


@pytest.mark.parametrize(
    ("written", "mode"),
    [
        ("enabled = true", TlsMode.VERIFY_FULL),
        ("enabled = false", TlsMode.DISABLE),
        ('enabled = false\ntrusted_root_certs = ""', TlsMode.DISABLE),
        ('mode = "require"', TlsMode.REQUIRE),
        ('mode = "require"\nenabled = true', TlsMode.REQUIRE),
        ("", TlsMode.PREFER),
    ],
)
def test_tls_takes_a_mode_or_the_short_form(written: str, mode: TlsMode) -> None:
    settings = load_settings(WHOLE.replace('mode = "verify-full"', written), ENVIRON)
    connect = settings.pipeline.pg_connection.connect_settings("test")
    assert connect.tls.sslmode is mode
    assert connect.tls.root_certs is None
    assert (connect.database, connect.application_name) == ("shop", "test")


def test_tls_settings_that_contradict_each_other_are_refused() -> None:
    (found,) = mistakes(WHOLE.replace('"verify-full"', '"verify-full"\nenabled = false'))
    assert found == 'pg_connection.tls.enabled: contradicts mode = "verify-full"; write only one of them'


def test_resume_must_lie_below_activate() -> None:
    found = mistakes(WHOLE + "[memory_backpressure]\nactivate = 0.5\n")
    assert found == ["memory_backpressure.resume: must be below activate (0.5), found 0.75"]


def test_backpressure_can_be_turned_off() -> None:
    assert load_settings("memory_backpressure = false\n" + WHOLE, ENVIRON).pipeline.memory_backpressure is None


def test_which_tables_are_copied() -> None:
    def copy(section: str) -> object:
        return load_settings(f"{WHOLE}[table_sync_copy]\n{section}", ENVIRON).pipeline.table_sync_copy

    only = load_settings(
        WHOLE + '[table_sync_copy]\nmode = "include_tables"\ntables = ["public.orders"]\n', ENVIRON
    ).pipeline.table_sync_copy
    assert only.mode is TableSyncCopyMode.INCLUDE_TABLES
    assert (only.copies("public.orders"), only.copies("public.items")) == (True, False)
    assert mistakes(WHOLE + '[table_sync_copy]\nmode = "skip_tables"\n') == [
        'table_sync_copy.tables: mode = "skip_tables" needs at least one table'
    ]
    assert mistakes(WHOLE + '[table_sync_copy]\nmode = "skip_tables"\ntables = ["orders"]\n') == [
        'table_sync_copy.tables: expected "namespace.name", found "orders"'
    ]
    assert mistakes(WHOLE + "[table_sync_copy]\ntables = [1]\n") == [
        "table_sync_copy.tables: expected a list of strings, found a list with something else in it"
    ]


def test_free_properties_take_strings_numbers_and_secrets() -> None:
    settings = load_settings(
        WHOLE + '[spark.conf]\n"spark.a" = true\n"spark.b" = 3\n"spark.secret.key" = { env = "SHOP_PASSWORD" }\n',
        ENVIRON,
    )
    revealed = {name: value.reveal() for name, value in settings.spark.conf.items()}
    assert revealed == {"spark.a": "true", "spark.b": "3", "spark.secret.key": ENVIRON["SHOP_PASSWORD"]}
    assert set(settings.secrets()) == {ENVIRON["SHOP_PASSWORD"]}
    found = mistakes(WHOLE + "[spark.conf]\nspark.a = 1\n")
    assert found == ['spark.conf."spark": expected a string, found a table; quote a name with dots: "spark.x"']


def test_a_file_that_cannot_be_read_and_one_that_is_no_toml_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path / "missing.toml", {})
    with pytest.raises(ConfigError, match="not valid TOML") as caught:
        load_settings("id = \n", {})
    assert "line 1" in caught.value.detail


def test_a_client_certificate_comes_from_files_beside_the_settings_or_as_text(tmp_path: Path) -> None:
    client = '[pg_connection.tls]\nclient_cert = "client.crt"\nclient_key = "keys/client.key"'
    written = tmp_path / "pipeline.toml"
    written.write_text(WHOLE.replace("[pg_connection.tls]", client))
    tls = load_settings(written, ENVIRON).pipeline.pg_connection.connect_settings().tls
    assert tls.client_cert == str(tmp_path / "client.crt")
    assert tls.client_key == Secret(str(tmp_path / "keys" / "client.key"))
    key = "-----BEGIN PRIVATE KEY-----\nMIIE\nvQIB\n-----END PRIVATE KEY-----"
    from_environment = client.replace('"keys/client.key"', '{ env = "KEY" }\nclient_key_password = { env = "OPENS" }')
    text = WHOLE.replace("[pg_connection.tls]", from_environment)
    settings = load_settings(text, {**ENVIRON, "KEY": key, "OPENS": "it"})
    tls = settings.pipeline.pg_connection.connect_settings().tls
    assert (tls.client_key, tls.client_key_password) == (Secret(key), Secret("it"))
    assert list(settings.secrets()) == [ENVIRON["SHOP_PASSWORD"], "it", "MIIE", "vQIB"]


@pytest.mark.parametrize(
    ("written", "mistake"),
    [
        ('client_cert = "c"', "client_key: missing; a client certificate and its key belong together"),
        ('client_key = "k"', "client_cert: missing; a client certificate and its key belong together"),
        ('client_key_password = "x"', "client_key_password: given without a client_key that it could decrypt"),
        (
            'mode = "disable"\nclient_cert = "c"\nclient_key = "k"',
            "client_cert: is not used without TLS; set another mode",
        ),
    ],
)
def test_half_a_client_certificate_is_refused(written: str, mistake: str) -> None:
    text = WHOLE.replace('[pg_connection.tls]\nmode = "verify-full"', f"[pg_connection.tls]\n{written}")
    assert mistakes(text)[0] == f"pg_connection.tls.{mistake}"


def test_several_hosts_and_the_wanted_server_are_settings() -> None:
    text = WHOLE.replace('host = "db.example.com"', 'host = "a,b:5433"\ntarget_session_attrs = "read-write"')
    connect = load_settings(text, ENVIRON).pipeline.pg_connection.connect_settings()
    assert [server.address for server in connect.each_host()] == ["a:5432", "b:5433"]
    assert connect.wanted_session is TargetSessionAttrs.READ_WRITE
