"""What is installed from the package index: types, SQL and the README are in it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.conformance import ROOT


def test_the_wheel_has_all_files_of_the_source_and_the_readme_as_its_description(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith("headwater-")}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        description = archive.read(metadata).decode("utf-8").partition("\n\n")[2]
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert packed == {file for file in files if "__pycache__" not in file}
    assert "headwater/py.typed" in packed
    assert description == (ROOT / "README.md").read_text(encoding="utf-8")
