"""A Spark whose executors are processes of their own: the warehouse must be one that all of them see."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pyspark
import pytest

pytestmark = pytest.mark.timeout(300)

START = """
import sys
from pathlib import Path
from headwater.config import DestinationConfig, SparkConfig
from headwater.contracts.destination import RunContext
from headwater.destinations.iceberg.destination import IcebergDestination
from headwater.destinations.iceberg.warehouse import spark_catalog
from headwater.spark.session import build_session
from headwater.store.memory import MemoryStore

settings = DestinationConfig(warehouse=sys.argv[1])
spark = build_session(SparkConfig(master="local-cluster[1,1,1024]", driver_memory="1g"), spark_catalog(settings))
destination = IcebergDestination(spark, MemoryStore(), settings)
destination.start(RunContext(1, "7001", lambda schema, keys: keys))
destination.shutdown()
spark.stop()
"""


def start(directory: Path, warehouse: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START, warehouse],
        env={**os.environ, "SPARK_HOME": str(Path(pyspark.__file__).parent)},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_executors_of_their_own_that_share_the_warehouse_let_the_pipeline_start_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    done = start(tmp_path, f"file://{tmp_path / 'lake'}")
    assert done.returncode == 0, done.stderr
    assert not [path for path in (tmp_path / "lake").rglob("*") if path.is_file() and "catalog.db" not in path.name]
    with closing(sqlite3.connect(tmp_path / "lake" / "catalog.db")) as catalog:
        assert catalog.execute("select count(*) from iceberg_tables").fetchone() == (0,)
        assert catalog.execute("select count(*) from iceberg_namespace_properties").fetchone() == (0,)


def test_executors_whose_disk_is_another_one_are_refused_with_the_names_of_the_hosts(tmp_path: Path) -> None:
    """The path leads each process to the directory it was started in: an executor's is another one than the driver's."""
    done = start(tmp_path, "/proc/self/cwd/lake")
    assert done.returncode != 0
    assert "is not shared by all hosts of the Spark cluster" in done.stderr
    assert f"executors on {socket.gethostname()}" in done.stderr
