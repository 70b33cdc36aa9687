"""Weeks of small batches must not fill the JVM with threads: pools that start one for each task are bounded."""

from __future__ import annotations

from headwater.config import SparkConfig
from headwater.destinations.iceberg.sessions import MAX_SESSIONS
from headwater.secret import Secret
from headwater.spark.session import session_config

POOLS = ("shuffleExchange", "resultQueryStage", "broadcastExchange")


def test_the_pools_of_spark_that_start_a_thread_for_each_task_are_bounded() -> None:
    config = session_config(SparkConfig(), {})
    for pool in POOLS:
        # Each table that is written holds one of them while it waits for its result, and a subquery of it another.
        assert MAX_SESSIONS < int(config[f"spark.sql.{pool}.maxThreadThreshold"]) <= 32
    chosen = session_config(SparkConfig(conf={"spark.sql.shuffleExchange.maxThreadThreshold": Secret("64")}), {})
    assert chosen["spark.sql.shuffleExchange.maxThreadThreshold"] == "64"
