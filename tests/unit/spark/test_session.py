"""Settings of the session: the caller's win, nothing secret reaches a command line, and a lost JVM is called that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pytest
from py4j.protocol import Py4JNetworkError

from headwater.config import SparkConfig
from headwater.errors import (
    ConnectError,
    ConnectionLost,
    DestinationError,
    HeadwaterError,
    Retry,
    ServerError,
    SparkLost,
    StoreError,
    ValueOutOfRange,
)
from headwater.secret import Secret
from headwater.spark.errors import translate
from headwater.spark.session import at_launch, session_config
from headwater.spark.task_errors import TaskFailed, marked, telling


def test_the_callers_settings_win() -> None:
    conf = {"spark.sql.shuffle.partitions": Secret("9"), "spark.ui.enabled": Secret("true")}
    settings = SparkConfig(master="local[1]", conf=conf)
    config = session_config(settings, {"spark.sql.catalog.lake": "x"})
    assert config["spark.sql.shuffle.partitions"] == "9"
    assert config["spark.ui.enabled"] == "true"
    assert config["spark.sql.catalog.lake"] == "x"
    assert config["spark.sql.session.timeZone"] == "UTC"


@pytest.mark.invariant(16)
def test_no_setting_that_may_be_secret_reaches_the_command_line() -> None:
    assert at_launch("spark.jars.packages")
    assert at_launch("spark.driver.memory")
    assert not at_launch("spark.sql.catalog.lake.uri")
    assert not at_launch("spark.hadoop.fs.s3a.secret.key")
    assert not at_launch("spark.driver.env.PASSWORD")


@pytest.mark.parametrize(
    "error",
    [
        Py4JNetworkError("Answer from Java side is empty"),
        ConnectionRefusedError(111, "Connection refused"),
        BrokenPipeError(),
    ],
)
def test_a_lost_jvm_is_called_that(error: Exception) -> None:
    lost = translate(error)
    assert isinstance(lost, SparkLost)
    assert lost.hint


def test_other_errors_are_the_destinations_and_ours_stay_as_they_are() -> None:
    assert type(translate(ValueError("odd"))) is DestinationError
    ours = StoreError("x")
    assert translate(ours) is ours


FROM_A_TASK = """Job aborted due to stage failure: Task 0 in stage 0.0 failed 1 times.
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "copy_source.py", line 76, in read_copy_ranges
    for rows in _read(origin, tasks[number]):
{error}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)
"""


def from_a_task(error: HeadwaterError) -> RuntimeError:
    """As the driver sees what a task raised."""

    def fail(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        raise error

    with pytest.raises(TaskFailed) as raised:
        list(telling(fail)([]))
    return RuntimeError(FROM_A_TASK.format(error=f"headwater.spark.task_errors.TaskFailed: {raised.value}"))


@pytest.mark.parametrize("detail", ["", "one line", "two\nlines"])
@pytest.mark.parametrize("hint", ["", "Change it."])
def test_an_error_of_ours_arrives_from_a_task_unchanged(detail: str, hint: str) -> None:
    raised = ValueOutOfRange("column day of t: infinity", detail=detail, hint=hint, retry=Retry.TIMED, table_id=7)
    met = translate(from_a_task(raised))
    assert type(met) is ValueOutOfRange
    assert vars(met) == vars(raised)
    server = translate(from_a_task(ServerError("no", sqlstate="55P03")))
    assert isinstance(server, ServerError)
    assert server.sqlstate == "55P03"


def test_a_text_that_looks_like_an_error_of_ours_is_not_taken_for_one() -> None:
    """As a value of a row may be that some other error quotes."""
    forged = marked(SparkLost("end it"), "0" * 32)
    for text in (forged, "headwater.errors.SparkLost: end it", "headwater-error::e30=:"):
        assert (
            type(translate(RuntimeError(FROM_A_TASK.format(error=f"ValueError: cannot parse {text}"))))
            is DestinationError
        )


def test_a_source_that_is_unreachable_from_a_task_is_an_error_of_the_connection() -> None:
    met = translate(from_a_task(ConnectError("cannot connect")))
    assert type(met) is ConnectionLost
    assert met.detail == "cannot connect"


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("java.lang.OutOfMemoryError: Java heap space", "spark.driver_memory"),
        ("org.apache.hadoop.security.AccessControlException: Permission denied: /lake", "right to read and write"),
        ("java.lang.NoSuchMethodError: scala.x()", "jar"),
        ("something else", "spark.log.level"),
    ],
)
def test_what_spark_says_leads_to_advice(said: str, advice: str) -> None:
    assert advice in translate(ValueError(said)).hint
