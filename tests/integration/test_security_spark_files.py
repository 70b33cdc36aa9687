"""What Spark puts on this machine's disk while it works are rows of the source: no other user may read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pyspark.sql import SparkSession


def test_blocks_of_shuffles_and_caches_lie_where_no_other_user_gets(spark: SparkSession) -> None:
    frame = spark.range(1000).repartition(3).persist()
    try:
        assert frame.count() == 1000
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        directories = [
            Path(str(path))
            for path in jvm.org.apache.spark.SparkEnv.get().blockManager().diskBlockManager().localDirs()
        ]
        assert directories
        for directory in directories:
            assert any(directory.rglob("shuffle_*")), "nothing was put on disk"
            above = [path.stat() for path in directory.parents]
            closed = [found for found in above if stat.S_IMODE(found.st_mode) == 0o700]
            assert [found.st_uid for found in closed[:1]] == [os.geteuid()]
    finally:
        frame.unpersist()
