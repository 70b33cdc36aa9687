"""Settings of the session: the caller's win, nothing secret reaches a command line, and a lost JVM is called that."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JNetworkError

from headwater.errors import DestinationError, SparkLost, StoreError
from headwater.spark.session import SparkSettings, at_launch, session_config, translate


def test_the_callers_settings_win() -> None:
    settings = SparkSettings(
        master="local[1]", config={"spark.sql.shuffle.partitions": "9", "spark.ui.enabled": "true"}
    )
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
