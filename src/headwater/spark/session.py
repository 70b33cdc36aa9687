"""One Spark session, set up for many small commits.

Contains the settings that make it faster (each with its measurement) and nothing about tables. The caller's settings override
all of them, except those that decide what SQL text means (`headwater.spark.sql_text`).
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from headwater.config import SparkConfig
from headwater.private_files import temporary_directory
from headwater.secret import revealed
from headwater.spark.jars import check, jar_settings
from headwater.spark.java import java_home
from headwater.spark.sql_text import SQL_TEXT

SCHEDULING_POOL = "spark.scheduler.pool"
"""A property of the thread whose jobs go into it."""


def build_session(settings: SparkConfig, catalog: Mapping[str, str]) -> SparkSession:
    """Start Spark, or take the process's running one. `catalog` are the settings of the lake's catalog."""
    # launch_gateway looks nowhere else.
    os.environ["JAVA_HOME"] = str(java_home())
    if settings.is_local:
        # Spark looks the host's name up before it reads any setting, and warns about what it finds.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Python workers run our interpreter: the first python3 on PATH may not have this package.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    config = session_config(settings, catalog)
    # PySpark hands what it knows at this point to the JVM's command line, where every user of the machine can read it. The
    # rest, credentials of catalogs and storage among it, follows through the gateway.
    launch = SparkConf(loadDefaults=False)
    launch.setAll([(key, value) for key, value in config.items() if at_launch(key)])
    SparkContext._ensure_initialized(conf=launch)
    _check_resolved_jars()
    builder = SparkSession.builder
    for key, value in config.items():
        builder = builder.config(key, value)
    silence_query_contexts()
    return builder.getOrCreate()


def silence_query_contexts() -> None:
    """PySpark logs the text of statements that failed, with the values of rows in them, before we see the error."""
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).disabled = True


def _check_resolved_jars() -> None:
    """Where Spark resolved the jars itself, it has done so by now, and has loaded nothing of them yet."""
    jvm = SparkContext._jvm
    assert jvm is not None
    named = str(jvm.System.getProperty("spark.jars") or "").split(",")
    paths = (Path(urlsplit(jar).path) for jar in named if urlsplit(jar).scheme in ("", "file"))
    check(path for path in paths if path.is_file())


def session_config(settings: SparkConfig, catalog: Mapping[str, str]) -> dict[str, str]:
    """Every setting of the session as plain keys; the caller's override ours, except those for what SQL text means."""
    config = {"spark.master": settings.master, "spark.app.name": "headwater"}
    config |= {"spark.driver.memory": settings.driver_memory}
    config |= _DEFAULTS | jar_settings()
    if settings.is_local:
        # Loopback only: no port of ours is open to others, and no host name has to resolve.
        config |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        # Spark would make `spark-warehouse` in the working directory.
        config["spark.sql.warehouse.dir"] = str(temporary_directory("spark-warehouse"))
        # What shuffles and caches put on disk are rows of the source, in files that Spark leaves readable by every user.
        config["spark.local.dir"] = str(temporary_directory("spark-local"))
    # Last of all: no setting may have a name of the source mean another one.
    return config | dict(catalog) | revealed(settings.conf) | SQL_TEXT


def at_launch(key: str) -> bool:
    """Whether a setting may stand in the JVM's command line: what only counts there, and never what may be secret."""
    if _SECRET.search(key):
        return False
    return key.startswith(("spark.driver.", "spark.jars", "spark.submit.")) or key in ("spark.master", "spark.app.name")


_SECRET = re.compile(r"secret|password|token|credential|access\.?key", re.IGNORECASE)

_DEFAULTS: dict[str, str] = {
    # Times are instants; a local zone would shift what has none.
    "spark.sql.session.timeZone": "UTC",
    # Columns "a" and "A" may both exist in Postgres.
    "spark.sql.caseSensitive": "true",
    # 10,000 by default, and createDataFrame(pa.Table) makes one partition per batch: 0.26 against 0.68 million rows/s.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000000",
    # 40 ms less a Python task than TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": "headwater.spark.daemon",
    # Several tables are written side by side; first in, first out would let a copy starve the changes.
    "spark.scheduler.mode": "FAIR",
    # A batch is small: every shuffle partition beyond the cores is a task that does nothing.
    "spark.sql.shuffle.partitions": "4",
    # These pools start a thread for each task until they are full, also while others are idle, and by default that is at 1,024:
    # two small batches a second led to 900 threads. At most 8 tables are written at once; each waits in a thread of the second.
    "spark.sql.shuffleExchange.maxThreadThreshold": "16",
    "spark.sql.resultQueryStage.maxThreadThreshold": "16",
    "spark.sql.broadcastExchange.maxThreadThreshold": "16",
    # What a UI would show is kept in memory for the whole run.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.ui.retainedTasks": "1000",
    "spark.sql.ui.retainedExecutions": "20",
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}",
}
