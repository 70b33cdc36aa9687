"""A Spark whose executors are processes of their own: the warehouse must be one that all of them see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

pytestmark = pytest.mark.timeout(300)

START = """
import sys
from pathlib import Path
from headwater.contracts.destination import RunContext
from headwater.destinations.iceberg.destination import IcebergDestination
from headwater.destinations.iceberg.settings import IcebergSettings
from headwater.spark.session import SparkSettings, build_session
from headwater.store.memory import MemoryStore

settings = IcebergSettings(sys.argv[1])
spark = build_session(SparkSettings(master="local-cluster[1,1,1024]", driver_memory="1g"), settings.spark_catalog())
destination = IcebergDestination(spark, MemoryStore(), settings)
destination.start(RunContext(1, "7001", lambda schema, keys: keys))
destination.shutdown()
spark.stop()
"""


def test_executors_of_their_own_that_share_the_warehouse_let_the_pipeline_start_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path / "lake")],
        env={**os.environ, "SPARK_HOME": str(Path(pyspark.__file__).parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "lake" / ".headwater").glob("shared-*"))
