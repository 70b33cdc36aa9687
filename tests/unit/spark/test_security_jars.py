"""A jar runs with all that the pipeline may do: only the files whose digests stand in the repository are used."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headwater.cache import cache_directory
from headwater.errors import HeadwaterError
from headwater.spark import jars
from headwater.spark.jars import JARS, Coordinate, check, digests, fetch, jar_directory, jar_settings

FETCHED = jar_directory()
"""Of this machine, before a test has a cache of its own."""


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache with links to the jars of the machine's."""
    fetched = fetch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "headwater"
    jar_directory().mkdir(parents=True)
    for path in fetched.glob("*.jar"):
        (jar_directory() / path.name).symlink_to(path)
    return jar_directory()


def replaced(directory: Path) -> Path:
    """Another file in place of the SQLite driver."""
    (path,) = directory.glob("*sqlite*.jar")
    path.unlink()
    path.write_bytes(b"PK not what was pinned")
    return path


def test_every_jar_has_its_digest_in_the_repository() -> None:
    assert set(digests()) >= {coordinate.file_name for coordinate in JARS}
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests().values())


def test_jars_with_the_digests_of_the_repository_are_used(own_cache: Path) -> None:
    assert jar_settings() == {"spark.jars": ",".join(str(path) for path in sorted(own_cache.glob("*.jar")))}


def test_a_jar_that_was_replaced_in_the_cache_is_refused_with_both_digests(own_cache: Path) -> None:
    path = replaced(own_cache)
    for use in (jar_settings, fetch):
        with pytest.raises(HeadwaterError, match="is not the file that was pinned") as caught:
            use()
        assert str(path) in caught.value.message
        assert hashlib.sha256(path.read_bytes()).hexdigest() in caught.value.detail
        assert digests()[path.name] in caught.value.detail
        assert str(own_cache) in caught.value.hint


def test_a_jar_without_a_digest_or_a_missing_one_is_refused(own_cache: Path) -> None:
    (own_cache / "extra.jar").write_bytes(b"PK")
    with pytest.raises(HeadwaterError, match="none of the expected jars"):
        jar_settings()
    (own_cache / "extra.jar").unlink()
    next(own_cache.glob("*sqlite*.jar")).unlink()
    with pytest.raises(HeadwaterError, match="is missing"):
        jar_settings()


def test_a_jar_that_arrives_with_another_digest_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pinned = dict.fromkeys(digests(), "0" * 64)
    monkeypatch.setattr(jars, "digests", lambda: pinned)

    def resolve(coordinates: tuple[Coordinate, ...], target: Path) -> None:
        for path in FETCHED.glob("*.jar"):
            (target / path.name).symlink_to(path)

    monkeypatch.setattr(jars, "_resolve", resolve)
    with pytest.raises(HeadwaterError, match="is not the file that was pinned"):
        fetch()
    assert not jar_directory().exists()


def test_what_spark_resolved_by_itself_is_checked_too(tmp_path: Path) -> None:
    name = JARS[1].file_name
    (tmp_path / name).write_bytes(b"PK not what was pinned")
    (tmp_path / "of_the_user.jar").write_bytes(b"PK")
    check([tmp_path / "of_the_user.jar"])
    with pytest.raises(HeadwaterError, match="is not the file that was pinned"):
        check([tmp_path / "of_the_user.jar", tmp_path / name])
