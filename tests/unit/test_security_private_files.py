"""What we write lies in directories that no other user can read or has prepared for us. Real directories, owners and links."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.cache import install
from headwater.cli.demo import _warehouse
from headwater.config import DestinationConfig, Secret, SparkConfig
from headwater.config.pipeline import BatchConfig
from headwater.destinations.iceberg.warehouse import prepare_warehouse
from headwater.engine.memory import spool
from headwater.errors import ConfigError
from headwater.private_files import check_path, make_directory, make_file, own_directory, temporary_directory
from headwater.spark.frames import FrameSpool
from headwater.spark.session import session_config

NOBODY = 65534


@pytest.fixture
def open_directory(tmp_path: Path) -> Path:
    """As /tmp is: every user may write to it."""
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def given_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a directory another user's. Only root can do that; for others, we are the other user."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: NOBODY)

    return give


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refuses(call: Callable[[], object], path: Path, said: str) -> None:
    with pytest.raises(ConfigError, match="is not safe") as raised:
        call()
    assert str(path) in raised.value.message
    assert said in raised.value.detail
    assert "destination.warehouse" in raised.value.hint


USES: dict[str, Callable[[Path], object]] = {
    "a warehouse": lambda path: prepare_warehouse(DestinationConfig(warehouse=str(path))),
    "a directory in a warehouse": lambda path: prepare_warehouse(DestinationConfig(warehouse=str(path / "a" / "b"))),
    "a spool": lambda path: FrameSpool(str(path)).disk(),
    "a spool in a warehouse": lambda path: FrameSpool(str(path / ".headwater" / "spool-1")).disk(),
    "a spool that is swept": lambda path: FrameSpool(str(path)).sweep(),
    "a spool for large transactions": lambda path: spool(BatchConfig(spool_directory=str(path))),
    "the demo's lake": _warehouse,
    "a cache": lambda path: install(path / "headwater" / "jars" / "x", lambda target: None),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_directory_that_another_user_made_where_all_may_write_is_refused(
    open_directory: Path, given_away: Callable[[Path], None], use: Callable[[Path], object]
) -> None:
    path = open_directory / "lake"
    path.mkdir()
    path.chmod(0o777)
    given_away(path)
    refuses(lambda: use(path), path, f"user {path.stat().st_uid} made it")
    assert not list(path.iterdir())


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_link_where_all_may_write_is_refused_and_nothing_behind_it_is_touched(
    open_directory: Path, tmp_path: Path, use: Callable[[Path], object]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (open_directory / "lake").symlink_to(elsewhere)
    refuses(lambda: use(open_directory / "lake"), open_directory / "lake", "symbolic link")
    assert not list(elsewhere.iterdir())


def test_a_spool_of_another_user_is_refused_wherever_it_lies_and_nothing_in_it_is_removed(
    tmp_path: Path, given_away: Callable[[Path], None]
) -> None:
    path = tmp_path / "lake" / ".headwater" / "spool-1"
    path.mkdir(parents=True)
    (path / "precious").touch()
    given_away(path)
    refuses(FrameSpool(str(path)).sweep, path, "owns it")
    assert (path / "precious").exists()


def test_fetched_programs_of_another_user_are_refused(tmp_path: Path, given_away: Callable[[Path], None]) -> None:
    target = install(tmp_path / "cache" / "x", lambda directory: (directory / "program").touch())
    assert mode(tmp_path / "cache") == 0o700
    given_away(target.parent)
    refuses(lambda: install(target, lambda directory: None), target.parent, "owns it")


def test_what_we_make_is_closed_to_others_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        prepare_warehouse(DestinationConfig(warehouse=str(tmp_path / "new" / "lake")))
        own_directory(tmp_path / "new" / "lake" / ".headwater" / "spool-1")
        make_file(tmp_path / "file")
        _warehouse(tmp_path / "demo")
    finally:
        os.umask(before)
    made = ["new", "new/lake", "new/lake/.headwater", "new/lake/.headwater/spool-1", "demo"]
    assert [mode(tmp_path / name) for name in made] == [0o700] * len(made)
    assert mode(tmp_path / "new" / "lake" / "catalog.db") == 0o600
    assert mode(tmp_path / "file") == 0o600


def test_the_mode_of_a_warehouse_that_the_user_made_stays(tmp_path: Path) -> None:
    path = tmp_path / "lake"
    path.mkdir()
    path.chmod(0o775)
    (path / "catalog.db").touch()
    (path / "catalog.db").chmod(0o664)
    prepare_warehouse(DestinationConfig(warehouse=str(path)))
    assert (mode(path), mode(path / "catalog.db")) == (0o775, 0o664)


def test_a_warehouse_that_another_user_owns_is_used_where_only_its_owner_could_make_it(
    tmp_path: Path, given_away: Callable[[Path], None]
) -> None:
    """A shared mount, made by whoever runs the machine."""
    path = tmp_path / "lake"
    path.mkdir()
    given_away(path)
    assert make_directory(path) == path


def test_a_catalog_file_that_another_user_put_into_an_open_warehouse_is_refused(
    open_directory: Path, tmp_path: Path, given_away: Callable[[Path], None]
) -> None:
    (open_directory / "catalog.db").symlink_to(tmp_path / "elsewhere.db")
    destination = DestinationConfig(warehouse=str(open_directory))
    refuses(partial(prepare_warehouse, destination), open_directory / "catalog.db", "symbolic link")


def test_links_in_places_of_our_own_are_followed(tmp_path: Path, open_directory: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert make_directory(tmp_path / "link" / "lake").is_dir()
    (open_directory / "ours").mkdir()
    (tmp_path / "out").symlink_to(open_directory / "ours")
    check_path(tmp_path / "out" / "lake")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    check_path(tmp_path / "circle")


def test_a_link_of_our_own_that_leads_through_anothers_is_refused(tmp_path: Path, open_directory: Path) -> None:
    (tmp_path / "real" / "lake").mkdir(parents=True)
    (open_directory / "link").symlink_to(tmp_path / "real")
    (tmp_path / "lake").symlink_to(open_directory / "link" / "lake")
    refuses(lambda: make_directory(tmp_path / "lake"), open_directory / "link", "symbolic link")


def test_a_directory_of_the_system_s_temporary_one_is_ours_alone(
    open_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(open_directory))
    made = temporary_directory("spool-1")
    assert made.is_relative_to(open_directory)
    assert (mode(made), mode(made.parent)) == (0o700, 0o700)
    made.chmod(0o755)
    assert mode(temporary_directory("spool-1")) == 0o700
    config = session_config(SparkConfig(master="local[1]"), {})
    for key in ("spark.sql.warehouse.dir", "spark.local.dir"):
        assert Path(config[key]).is_relative_to(made.parent)
        assert mode(Path(config[key])) == 0o700
        assert session_config(SparkConfig(master="local[1]", conf={key: Secret("/mine")}), {})[key] == "/mine"
        assert key not in session_config(SparkConfig(master="spark://host:7077"), {})
    for left in made.parent.iterdir():
        left.rmdir()
    made.parent.rmdir()
    made.parent.symlink_to(tmp_path)
    refuses(lambda: temporary_directory("spool-1"), made.parent, "symbolic link")


def test_rows_in_the_spool_are_not_readable_by_other_users(tmp_path: Path) -> None:
    frames, path = FrameSpool(str(tmp_path / "spool")), tmp_path / "spool" / "1.parquet"
    before = os.umask(0)
    try:
        frames.disk()
        frames._write(pa.table({"id": [1]}), str(path))
    finally:
        os.umask(before)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert pq.read_table(path).to_pydict() == {"id": [1]}
