from __future__ import annotations

from pathlib import Path

import pytest

from headwater.spark.jars import JARS, jar_settings


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_without_fetched_jars_spark_resolves_the_coordinates() -> None:
    settings = jar_settings()
    assert settings["spark.jars.packages"].split(",") == [str(coordinate) for coordinate in JARS]
    assert "spark.jars" not in settings
