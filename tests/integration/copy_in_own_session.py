"""Run by test_copy.py in a process of its own: copies with UI, event log and retries, and keeps all that Spark shows."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from headwater.config import SparkConfig
from headwater.secret import Secret
from headwater.source.exported_snapshot import exported_snapshot
from headwater.spark.copy_source import copy_dataframe, register_copy_source
from headwater.spark.map_in_arrow import map_in_arrow
from headwater.spark.session import build_session
from headwater.wire.settings import ConnectSettings

PAGES = ("jobs/", "stages/", "stages/stage/?id=0&attempt=0", "environment/", "executors/", "SQL/")


def fail_the_first_attempt(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    for batch in batches:
        yield batch
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails after its first batch")


def explained(frame: DataFrame) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        frame.explain(mode="extended")
        frame.explain(mode="formatted")
    return text.getvalue() + repr(frame)


def save_pages(url: str, application: str, directory: Path) -> None:
    api = f"api/v1/applications/{application}"
    details = [f"SQL/execution/?id={i}" for i in range(4)]
    answers = [
        f"{api}/{what}" for what in ("environment", "stages?details=true", "sql?details=true&planDescription=true")
    ]
    for number, page in enumerate([*PAGES, *details, *answers]):
        with urllib.request.urlopen(f"{url}/{page}", timeout=30) as answer:
            (directory / f"ui-{number}").write_bytes(answer.read())


def main(directory: Path) -> None:
    settings: ConnectSettings = pickle.loads(sys.stdin.buffer.read())
    events = directory / "events"
    events.mkdir()
    config = {
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
    }
    # Log lines of the driver and its tasks go to our stderr, which the test reads.
    conf = {name: Secret(value) for name, value in {**config, "spark.log.level": "INFO"}.items()}
    spark = build_session(SparkConfig(master="local[2,2]", conf=conf), {})
    try:
        with exported_snapshot(settings, "shop", target_range_bytes=64 << 10, parallelism=2) as snapshot:
            planned = snapshot.tables["public.t"]
            assert len(planned.plan.ranges) > 4
            frame = copy_dataframe(spark, settings, snapshot.snapshot_name, planned.plan, planned.schema, 2)
            retried = map_in_arrow(frame, fail_the_first_attempt, frame.schema)
            register_copy_source(spark, snapshot)
            through_source = spark.read.format("postgres_copy").options(**snapshot.options("public.t")).load()
            for one in (frame, retried, through_source):
                assert sorted(row.id for row in one.collect()) == list(range(1, 20001))
            (directory / "plans").write_text("".join(explained(one) for one in (frame, retried, through_source)))
            (directory / "process").write_bytes(Path(f"/proc/{os.getpid()}/cmdline").read_bytes())
        url = spark.sparkContext.uiWebUrl
        assert url is not None
        save_pages(url, spark.sparkContext.applicationId, directory)
    finally:
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
