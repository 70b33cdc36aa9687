"""docs/architecture.md names the packages, in their order, and the threads that there are."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.conformance import ROOT
from tests.walks.page import LEGS, StrangeThread, describe, files_of
from tests.walks.record import COPY, UPDATE, Called

SOURCE = ROOT / "src" / "headwater"
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def first_column(heading: str) -> list[str]:
    section = DOCUMENT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.M)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_packages_are_listed_in_the_order_that_import_linter_checks() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    checked = [name.strip("()") for layer in layers for name in re.split(r" [|:] ", layer)]
    built = [name for name in checked if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists()]
    assert first_column("Rooms, and who may know whom") == built


def test_the_threads_are_those_that_the_sources_name() -> None:
    """Those of a pipeline: the demo and the tests have more. Outputs have threads of their names."""
    packages = ("engine", "destinations", "observability", "cli")
    files = [path for package in packages for path in (SOURCE / package).rglob("*.py") if "demo" not in path.name]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    name = r'f?"(headwater-[a-z]+(?:-[a-z]+)*)'
    started = set(re.findall(rf"(?:name=|prefix=|SideThread\()\s*{name}", sources))
    outputs = {f"headwater-{output.replace(' ', '-')}" for output in re.findall(r'= Outlet\("([^"]+)"', sources)}
    listed = {re.sub(r"-<.*", "", thread) for thread in first_column("Threads")}
    assert started | outputs <= listed <= set(re.findall(name, sources)) | outputs


def test_each_files_description_is_its_docstrings_first_sentence() -> None:
    assert describe(DOCUMENT) == DOCUMENT, "run: make docs"


def called(thread: str, module: str) -> Called:
    return Called(0.0, thread, module, "f")


def test_a_file_is_listed_where_the_row_meets_it_first_and_threads_by_the_clock_are_left_out() -> None:
    calls = [
        called("headwater-lake-table_0", "lsn.py"),
        called("headwater-lake-table_0", "destinations/iceberg/table.py"),
        called("headwater-heartbeat", "engine/supervise/heartbeat.py"),
        called("headwater-apply", "wire/pgoutput.py"),
        called("headwater-apply", "lsn.py"),
    ]
    found = {leg.thread: modules for leg, modules in files_of(UPDATE, calls) if modules}
    assert found == {
        "headwater-apply": ["wire/pgoutput.py", "lsn.py"],
        "headwater-lake-table_.*": ["destinations/iceberg/table.py"],
    }


@pytest.mark.parametrize("walk", [COPY, UPDATE])
def test_a_thread_that_the_walk_does_not_know_is_refused(walk: str) -> None:
    assert LEGS[walk]
    with pytest.raises(StrangeThread, match="headwater-new"):
        files_of(walk, [called("headwater-new", "lsn.py")])
