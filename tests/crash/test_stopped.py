"""A driver that is stopped for a while, and goes on when another has taken over: one of them ends, and the tables are equal."""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg
import pytest

from headwater.testing.compare import wait_until
from tests.background_writes import writing_by
from tests.conftest import Database
from tests.pipeline_process import pipeline_process

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

END_LOCK = """
    select pg_terminate_backend(pid, 10000) from pg_stat_activity
    where application_name = 'headwater_lock_1' and datname = current_database()
"""


def _change(connection: psycopg.Connection[tuple[object, ...]], turn: int) -> None:
    connection.execute("update orders set counter = counter + 1 where id = %s", [turn % 100])
    connection.execute("insert into orders values (%s, 1)", [1000 + turn])
    connection.execute("delete from orders where id = %s", [1000 + turn - 10])


@pytest.mark.invariant(6)
def test_a_driver_that_was_stopped_while_another_took_over_ends_and_writes_nothing_more(
    database: Database, tmp_path: Path
) -> None:
    database.execute("create table orders(id int primary key, counter int not null)")
    database.execute("insert into orders select i, 1 from generate_series(0, 99) i")
    database.execute("create publication shop for table orders")
    with pipeline_process(database, tmp_path) as first, pipeline_process(database, tmp_path) as second:
        second._log = tmp_path / "second.txt"
        first.start()
        first.wait_ready(1)
        with writing_by(database, _change, pace_seconds=0.01):
            first.wait_caught_up()
            first.signal(signal.SIGSTOP)
            try:
                # As the server does by itself once the network to a stopped machine is gone.
                assert database.value(END_LOCK)
                second.start()
                second.wait_said("pipeline 1 is up", 120)
                before = database.value("select token from headwater.runs")
            finally:
                first.signal(signal.SIGCONT)
            assert first.wait() == 1, first.output
            assert "is already running" in first.output or "has taken over" in first.output
            second.wait_caught_up()
        second.wait_caught_up()
        wait_until(lambda: second.states() == ["ready"], 60, what="the table to be ready")
        assert database.value("select token from headwater.runs") == before
        assert second.stop() == 0, second.output
        second.assert_equal("orders")
