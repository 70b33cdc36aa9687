"""`headwater run` with a standard output and error that are not read: it continues, and a SIGTERM ends it in order."""

from __future__ import annotations

import signal
from pathlib import Path

from headwater.testing.compare import wait_until
from tests.blocked_pipe import blocked_pipe
from tests.conftest import Database
from tests.pipeline_process import pipeline_process


def test_a_pipeline_whose_output_is_not_read_starts_applies_changes_and_stops_in_order(
    database: Database, tmp_path: Path
) -> None:
    database.execute("create table orders (id int primary key, status text)")
    database.execute("insert into orders select i, 'new' from generate_series(1, 100) i")
    database.execute("create publication shop for table orders")
    with blocked_pipe() as out, blocked_pipe() as error, pipeline_process(database, tmp_path) as running:
        running.start(stdout=out.writer, stderr=error.writer)
        running.wait_ready(1)
        jvm = running.jvm()
        database.execute("update orders set status = 'paid' where id % 2 = 0")
        database.execute("delete from orders where id % 10 = 0")
        running.wait_caught_up()
        assert out.is_full
        assert error.is_full
        running.signal(signal.SIGTERM)
        assert running.wait(60) == 0
        running.assert_equal("orders")
        # Nobody has begun to read: Spark's JVM ends all the same.
        wait_until(lambda: not Path(f"/proc/{jvm}").exists(), 30, what="the JVM's end")
