from __future__ import annotations

from pathlib import Path

import pytest

from headwater.spark.jars import JARS, jar_directory, jar_settings


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_without_fetched_jars_spark_resolves_the_coordinates() -> None:
    settings = jar_settings()
    assert settings["spark.jars.packages"].split(",") == [str(coordinate) for coordinate in JARS]
    assert "spark.jars" not in settings


def test_fetched_jars_are_named_as_files_and_nothing_is_resolved() -> None:
    jar_directory().mkdir(parents=True)
    paths = [jar_directory() / "a.jar", jar_directory() / "b.jar"]
    for path in paths:
        path.touch()
    assert jar_settings() == {"spark.jars": f"{paths[0]},{paths[1]}"}
