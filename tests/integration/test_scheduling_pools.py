"""Spark shares the cores fairly between pools: a copy has one, and each table whose changes are applied another."""

from __future__ import annotations

from pyspark.sql import SparkSession

from headwater.destinations.iceberg.sessions import SessionPool
from headwater.engine.table_sync.table_copy import tagged
from headwater.spark.session import SCHEDULING_POOL


def test_the_jobs_of_a_copy_stay_in_its_own_scheduling_pool(spark: SparkSession) -> None:
    sessions, context = SessionPool(spark, "lake", {}), spark.sparkContext
    seen: list[str | None] = []

    def write() -> None:
        with sessions.session("a copy", ["t"]):
            seen.append(context.getLocalProperty(SCHEDULING_POOL))

    tagged(spark, "headwater-copy-1-7", write)
    assert seen == ["headwater-copy-1-7"]
    assert context.getLocalProperty(SCHEDULING_POOL) is None
    write()
    assert seen[1] is not None
    assert seen[1] != seen[0]
    context.setLocalProperty(SCHEDULING_POOL, None)  # type: ignore[arg-type]
