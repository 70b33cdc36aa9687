"""What Spark says on the standard error of a pipeline is one line an entry too, in which a name is text and nothing else."""

from __future__ import annotations

import subprocess
import sys

from tests.blocked_pipe import blocked_pipe

# Only the JVM: no session, and none of its time.
JVM = """
import os, sys, time
from pyspark import SparkConf, SparkContext
from headwater.spark.java import java_home
from headwater.config import SparkConfig
from headwater.spark.session import at_launch, session_config

os.environ["JAVA_HOME"] = str(java_home())
launch = SparkConf(loadDefaults=False)
launch.setAll([(key, value) for key, value in session_config(SparkConfig(), {}).items() if at_launch(key)])
SparkContext._ensure_initialized(conf=launch)
jvm = SparkContext._jvm
logs = jvm.org.apache.logging.log4j.LogManager
log = logs.getLogger("org.apache.spark.Test")
"""
FORGED = """
error = jvm.java.lang.RuntimeException("why\\n2026-01-01T00:00:00.000Z spark ERROR Test: forged\\x1b[2K")
log.error("table a\\r\\n2026-01-01T00:00:00.000Z spark ERROR Test: forged \\x1b[31m\\x9b\\u202e\\u2028\\u200b\\x07 end", error)
logs.shutdown()
"""
MANY = """
for number in range(5000):
    log.error("x" * 1000)
print("went on", flush=True)
"""


def test_no_entry_of_sparks_log_is_forged_by_a_name_or_an_error() -> None:
    run = subprocess.run([sys.executable, "-c", JVM + FORGED], capture_output=True, text=True, timeout=120, check=True)
    (entry,) = [line for line in run.stderr.split("\n") if "forged" in line]
    assert r" spark ERROR Test: table a\r\n2026-01-01" in entry
    assert r"java.lang.RuntimeException: why\n2026-01-01" in entry
    assert not [character for character in entry if not character.isprintable()], repr(entry)


def test_a_standard_error_that_takes_nothing_does_not_stop_spark() -> None:
    with blocked_pipe() as pipe:
        run = subprocess.run(
            [sys.executable, "-c", JVM + MANY], stdout=subprocess.PIPE, stderr=pipe.writer, timeout=120
        )
    assert b"went on" in run.stdout
