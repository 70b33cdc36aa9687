"""What Spark puts on this machine's disk while it works are rows of the source: no other user may read them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# A process of its own: where Spark puts files is settled when its JVM starts. What was put there is told before it is removed.
PROGRAM = """
import os, stat
from pathlib import Path
from headwater.config import SparkConfig
from headwater.spark.session import build_session

os.umask(0o022)
spark = build_session(SparkConfig(master="local[1]"), {})
assert spark.range(1000).repartition(3).persist().count() == 1000

def show(directory, closed):
    for path in directory.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            show(path, closed or not mode & 0o077)
        elif path.name.startswith("shuffle_"):
            print("closed" if closed or not mode & 0o077 else "open", path, flush=True)

show(Path(os.environ["TMPDIR"]), False)
spark.stop()
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """PySpark makes sockets in the temporary directory, and their paths may have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="hw-") as made:
        yield Path(made)


def test_files_of_shuffles_lie_where_no_other_user_gets(short_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_DIRS"}
    # Of the JVM too, which does not look at TMPDIR.
    environment |= {"TMPDIR": str(short_path), "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={short_path}"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=240
    )
    found = [line.split()[0] for line in run.stdout.splitlines()]
    assert found
    assert set(found) == {"closed"}, run.stdout
