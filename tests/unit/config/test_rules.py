"""Settings made in Python are checked by the same rules, and the documentation names every one."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from headwater.config import BatchConfig, MemoryBackpressureConfig, PgConnectionConfig, PipelineConfig, Secret
from headwater.config.reference import reference, replace_reference
from headwater.errors import ConfigError

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
