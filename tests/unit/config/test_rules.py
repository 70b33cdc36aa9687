"""Settings made in Python are checked by the same rules, and the documentation names every one."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from headwater.config import (
    BatchConfig,
    CatalogConfig,
    CatalogType,
    DestinationConfig,
    MemoryBackpressureConfig,
    PgConnectionConfig,
    PipelineConfig,
    Secret,
    SparkConfig,
    TlsConfig,
)
from headwater.config.reference import reference, replace_reference
from headwater.destinations.iceberg.warehouse import spark_catalog
from headwater.errors import ConfigError
from headwater.spark.session import session_config
from headwater.wire.tls_config import TlsMode

CONNECTION = PgConnectionConfig(host="h", name="d", username="u", password=Secret("s3cret-s3cret"))


def test_settings_made_in_python_report_every_mistake_at_once() -> None:
    config = PipelineConfig(
        id=0,
        publication_name="",
        pg_connection=PgConnectionConfig(host="h", port=70_000, name="d", username="u"),
        batch=BatchConfig(max_fill_ms=0),
        memory_backpressure=MemoryBackpressureConfig(activate=0.5, resume=0.6),
        max_table_sync_workers="four",  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError) as caught:
        config.validate()
    assert caught.value.message == "the pipeline's settings have 6 mistakes"
    assert [line.partition(":")[0] for line in caught.value.detail.splitlines()] == [
        "id",
        "publication_name",
        "pg_connection.port",
        "batch.max_fill_ms",
        "max_table_sync_workers",
        "memory_backpressure.resume",
    ]


def test_right_settings_pass_and_survive_pickling() -> None:
    config = PipelineConfig(id=1, publication_name="p", pg_connection=CONNECTION, memory_backpressure=None)
    config.validate()
    assert pickle.loads(pickle.dumps(config)) == config
    assert "s3cret" not in repr(config)


def test_every_setting_is_documented_as_the_classes_declare_it() -> None:
    document = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert document == replace_reference(document), "run: python -m headwater.config.reference docs/configuration.md"
    assert "| `max_fill_ms` |" in reference()


def test_security_a_plain_password_given_in_python_becomes_a_secret() -> None:
    connection = PgConnectionConfig(
        host="db",
        name="shop",
        username="me",
        password="plain text",  # type: ignore[arg-type]
        tls=TlsConfig(client_cert="a", client_key="key text", client_key_password="key word"),  # type: ignore[arg-type]
    )
    connection.validate()
    shown = repr(connection) + repr(connection.connect_settings())
    assert not any(secret in shown for secret in ("plain text", "key text", "key word"))
    assert connection.connect_settings().password == Secret("plain text")
    assert set(connection.secrets()) == {"plain text", "key word"}


def test_security_plain_texts_in_free_tables_become_secrets() -> None:
    spark = SparkConfig(conf={"spark.hadoop.fs.s3a.secret.key": "s3cret", "spark.sql.shuffle.partitions": 9})  # type: ignore[dict-item]
    catalog = CatalogConfig(type=CatalogType.REST, uri="http://c", properties={"token": "s3cret"})  # type: ignore[dict-item]
    destination = DestinationConfig(warehouse="/lake", catalog=catalog, table_properties={"a": True})  # type: ignore[dict-item]
    assert "s3cret" not in repr(spark) + repr(destination)
    assert session_config(spark, {})["spark.hadoop.fs.s3a.secret.key"] == "s3cret"
    assert session_config(spark, {})["spark.sql.shuffle.partitions"] == "9"
    assert spark_catalog(destination)["spark.sql.catalog.lake.token"] == "s3cret"
    assert destination.table_properties["a"] == Secret("true")
    with pytest.raises(ConfigError) as caught:
        SparkConfig(conf={"spark.x": ["y"]}).validate()  # type: ignore[dict-item]
    assert "conf: expected a string, a number, true or false" in caught.value.detail


def test_settings_of_a_connection_travel_to_executors_as_they_are() -> None:
    tls = TlsConfig(mode="verify-ca", trusted_root_certs="roots", client_cert="cert", client_key="s3cret")  # type: ignore[arg-type]
    given = PgConnectionConfig(host="db", name="shop", username="me", tls=tls).connect_settings()
    arrived = pickle.loads(pickle.dumps(given))
    assert arrived == given
    assert arrived.tls.sslmode is TlsMode.VERIFY_CA
    assert "s3cret" not in repr(arrived)


def test_security_a_mode_given_as_text_in_python_is_the_mode() -> None:
    """Compared by identity in places: text would have been no mode at all."""
    for mode in TlsMode:
        assert TlsConfig(mode=mode.value).sslmode is mode  # type: ignore[arg-type]
    required = TlsConfig(mode="require", trusted_root_certs="roots.pem")  # type: ignore[arg-type]
    assert required.verifies


def test_what_cannot_be_taken_is_left_for_validate() -> None:
    connection = PgConnectionConfig(host="db", name="shop", username="me", port="many", password=7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        connection.validate()
    assert "port: expected an integer" in caught.value.detail
    assert "password: expected a string, found an integer" in caught.value.detail
