"""Errors of Spark and Py4J as errors of ours, and whether the JVM still runs."""

from __future__ import annotations

import re

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import SparkSession

from headwater.errors import (
    ConnectError,
    ConnectionLost,
    DestinationError,
    DestinationUnavailable,
    HeadwaterError,
    SparkLost,
)
from headwater.limits import limit_reached
from headwater.spark.causes import is_unreachable, java_causes, root_cause
from headwater.spark.task_errors import found_in

_MAX_DETAIL = 600


def jvm_alive(spark: SparkSession) -> bool:
    """Whether the JVM of this session still answers."""
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception as error:
        # A thread's first call opens a socket of its own: one that cannot be had says nothing of the JVM.
        return limit_reached(error, "asking the JVM") is not None


def jvm_lost(detail: str) -> SparkLost:
    return SparkLost(
        "the JVM that runs Spark has ended",
        detail=detail,
        hint="Look for an out-of-memory kill in the system's log, raise spark.driver_memory, and start the pipeline again.",
    )


def translate(error: BaseException) -> HeadwaterError:
    """An error of Spark or Py4J as one of ours. A lost JVM is SparkLost; the outcome of commits under way is unknown then."""
    if isinstance(error, HeadwaterError):
        return error
    if not java_causes(error) and (limit := limit_reached(error, "calling Spark")) is not None:
        return limit
    if is_jvm_lost(error):
        return jvm_lost(_detail(error))
    said = _what_was_said(error)
    ours = found_in(str(error))
    if isinstance(ours, (ConnectError, ConnectionLost)):
        return ConnectionLost(
            "the source became unreachable while Spark was reading it",
            detail=ours.summary if ours.detail else ours.message,
            hint="No action is needed: the copy starts again when the source is reachable.",
        )
    if ours is not None:
        return ours
    causes = java_causes(error)
    detail = root_cause(causes)[:_MAX_DETAIL] if causes else _detail(error)
    if is_unreachable(causes):
        return DestinationUnavailable(
            "the lake or its catalog is unreachable",
            detail=detail,
            hint="Check the warehouse and the catalog. Headwater retries until they answer.",
        )
    advice = next((advice for mark, advice in _ADVICE if mark.search(said)), _NO_ADVICE)
    return DestinationError("Spark failed", detail=detail, hint=f"This is retried. If it repeats: {advice}")


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
        "a jar is missing or has another version; remove your own jars from spark.conf, then run: make setup",
    ),
)
_NO_ADVICE = 'set "spark.log.level" = "WARN" under [spark.conf] to see more of Spark\'s log, and start again.'


def _what_was_said(error: BaseException) -> str:
    """Messages and causes, without the frames of the stack, which would match everything."""
    return "\n".join(line for line in str(error).splitlines() if not line.lstrip().startswith(("at ", "...")))


def is_jvm_lost(error: BaseException) -> bool:
    """Whether an error means that the JVM or its SparkContext has ended, rather than that a call was refused."""
    if isinstance(error, (Py4JNetworkError, ConnectionError, BrokenPipeError)):
        return True
    if isinstance(error, Py4JError) and not hasattr(error, "java_exception"):
        text = str(error)
        return "Answer from Java side is empty" in text or "network error" in text.lower()
    text = str(error)
    return "SparkContext was shut down" in text or "stopped SparkContext" in text


def _detail(error: BaseException) -> str:
    """The first lines of the message, without the stack."""
    text = error.getMessage() if isinstance(error, PySparkException) else None
    lines = [line.strip() for line in (text or str(error)).splitlines() if line.strip()]
    said = " ".join(line for line in lines[:4] if not line.startswith("at "))
    return f"{type(error).__name__}: {said}"[:_MAX_DETAIL]
