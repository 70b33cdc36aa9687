"""One Spark session, set up for many small commits, and what becomes of errors when its JVM is gone.

Knows which settings pay (each with its measurement) and nothing of tables. Whatever the caller sets wins over all of them, but
for what SQL text means (`headwater.spark.sql_text`).
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkConf, SparkContext
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import SparkSession

from headwater.config import SparkConfig
from headwater.errors import (
    ConnectError,
    ConnectionLost,
    DestinationError,
    DestinationUnavailable,
    HeadwaterError,
    SparkLost,
)
from headwater.limits import limit_reached
from headwater.private_files import temporary_directory
from headwater.secret import revealed
from headwater.spark.causes import is_unreachable, java_causes, root_cause
from headwater.spark.jars import check, jar_settings
from headwater.spark.java import java_home
from headwater.spark.sql_text import SQL_TEXT
from headwater.spark.task_errors import found_in

_MAX_DETAIL = 600
SCHEDULING_POOL = "spark.scheduler.pool"
"""A property of the thread whose jobs go into it."""


def build_session(settings: SparkConfig, catalog: Mapping[str, str]) -> SparkSession:
    """Start Spark, or take the process's running one. `catalog` are the settings of the lake's catalog."""
    # launch_gateway looks nowhere else.
    os.environ["JAVA_HOME"] = str(java_home())
    if settings.is_local:
        # Spark looks the host's name up before it reads any setting, and warns about what it finds.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Python workers run what we run: the first python3 on PATH may know nothing of this package.
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
    """Every setting of the session as plain keys; the caller's win over ours, but for what SQL text means."""
    config = {"spark.master": settings.master, "spark.app.name": "headwater"}
    config |= {"spark.driver.memory": settings.driver_memory}
    config |= _DEFAULTS | jar_settings()
    if settings.is_local:
        # Loopback only: no port of ours is open to others, and no host name has to resolve.
        config |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        # Spark would make `spark-warehouse` in the working directory.
        config["spark.sql.warehouse.dir"] = str(temporary_directory("spark-warehouse"))
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


def jvm_alive(spark: SparkSession) -> bool:
    """Whether the JVM of this session still answers."""
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception as error:
        # A thread's first call opens a socket of its own: one that cannot be had says nothing of the JVM.
        return limit_reached(error, "asking the JVM") is not None


def translate(error: BaseException) -> HeadwaterError:
    """What an error of Spark or Py4J means to us. A lost JVM is SparkLost; every commit under way is unknown then."""
    if isinstance(error, HeadwaterError):
        return error
    if not java_causes(error) and (limit := limit_reached(error, "calling Spark")) is not None:
        return limit
    if is_jvm_lost(error):
        return SparkLost(
            "the JVM that runs Spark is gone",
            detail=_detail(error),
            hint="Look for an out-of-memory kill in the system's log, raise spark.driver_memory, and start the pipeline again.",
        )
    said = _what_was_said(error)
    ours = found_in(str(error))
    if isinstance(ours, (ConnectError, ConnectionLost)):
        return ConnectionLost(
            "the source became unreachable while Spark was reading it",
            detail=ours.summary if ours.detail else ours.message,
            hint="Nothing is to be done: the copy starts again when the source is back.",
        )
    if ours is not None:
        return ours
    causes = java_causes(error)
    detail = root_cause(causes)[:_MAX_DETAIL] if causes else _detail(error)
    if is_unreachable(causes):
        return DestinationUnavailable(
            "the lake or its catalog is unreachable",
            detail=detail,
            hint="Check the warehouse and the catalog; it is tried again until they answer.",
        )
    advice = next((advice for mark, advice in _ADVICE if mark.search(said)), _NO_ADVICE)
    return DestinationError("Spark failed", detail=detail, hint=f"It is tried again; if this goes on: {advice}")


_ADVICE = (
    (re.compile(r"OutOfMemoryError|GC overhead"), "raise spark.driver_memory, or lower batch.max_bytes."),
    (
        re.compile(r"AccessDenied|AccessControlException|Permission denied|Forbidden|NotAuthorized", re.IGNORECASE),
        "give this process the right to read and write the warehouse and its catalog.",
    ),
    (
        re.compile(
            r"ClassNotFoundException|No suitable driver|NoClassDefFoundError|NoSuchMethodError|Failed to find data source"
        ),
        "a jar is missing or of another version; take your own ones out of spark.conf, then set up again: make setup",
    ),
)
_NO_ADVICE = 'set "spark.log.level" = "WARN" under [spark.conf] to see more of what Spark says, and start again.'


def _what_was_said(error: BaseException) -> str:
    """Messages and causes, without the frames of the stack: those name everything."""
    return "\n".join(line for line in str(error).splitlines() if not line.lstrip().startswith(("at ", "...")))


def is_jvm_lost(error: BaseException) -> bool:
    """Whether an error means that there is nobody to talk to, rather than that somebody said no."""
    if isinstance(error, (Py4JNetworkError, ConnectionError, BrokenPipeError)):
        return True
    if isinstance(error, Py4JError) and not hasattr(error, "java_exception"):
        text = str(error)
        return "Answer from Java side is empty" in text or "network error" in text.lower()
    text = str(error)
    return "SparkContext was shut down" in text or "stopped SparkContext" in text


def _detail(error: BaseException) -> str:
    """The first lines of what was said, without the stack."""
    text = error.getMessage() if isinstance(error, PySparkException) else None
    lines = [line.strip() for line in (text or str(error)).splitlines() if line.strip()]
    said = " ".join(line for line in lines[:4] if not line.startswith("at "))
    return f"{type(error).__name__}: {said}"[:_MAX_DETAIL]
