from __future__ import annotations

import threading
from pathlib import Path

import pytest

from headwater.cache import cache_directory, install


def test_the_cache_follows_the_xdg_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "headwater"


def test_a_relative_xdg_setting_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "headwater"


def test_what_failed_half_way_does_not_look_installed(tmp_path: Path) -> None:
    def half(target: Path) -> None:
        (target / "first").touch()
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        install(tmp_path / "thing", half)
    assert not (tmp_path / "thing").exists()
    install(tmp_path / "thing", lambda target: (target / "second").touch())
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["second"]


def test_racing_installers_fill_once(tmp_path: Path) -> None:
    filled: list[int] = []
    start = threading.Barrier(8)

    def fill(target: Path) -> None:
        filled.append(1)
        (target / "content").write_text("whole")

    def race() -> None:
        start.wait()
        assert (install(tmp_path / "thing", fill) / "content").read_text() == "whole"

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1
