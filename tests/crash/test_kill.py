"""Kill the driver or its JVM at the worst moments, start again: the tables end equal and no key is there twice."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import psycopg
import pytest

from headwater.testing.compare import wait_until
from tests.background_writes import writing_by
from tests.conftest import Database
from tests.integration.silent_proxy import silent_proxy
from tests.pipeline_process import pipeline_process

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

ROWS = 200_000
READY_SECONDS = 300.0
"""Long enough for a machine that is busy with other tests; nothing is measured here."""


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        f"""
        create table orders(id int primary key, counter int not null, note text);
        insert into orders select i, 1, repeat(md5(i::text), 4) from generate_series(1, {ROWS}) i;
        create table small(id int primary key, counter int not null);
        insert into small select i, 1 from generate_series(1, 100) i;
        create publication shop for table orders, small;
        """
    )
    return database


def writing(database: Database) -> AbstractContextManager[None]:
    """A writer that counts up, moves keys, deletes and inserts, at a steady pace."""
    return writing_by(database, _change, pace_seconds=0.005)


def _change(connection: psycopg.Connection[tuple[object, ...]], turn: int) -> None:
    with connection.transaction():
        connection.execute("update small set counter = counter + 1")
        first = turn * 37 % ROWS
        connection.execute("update orders set counter = counter + 1 where id between %s and %s", [first, first + 20])
        connection.execute("delete from orders where id = %s", [turn * 101 % ROWS])
        connection.execute("insert into orders values (%s, 1, 'new')", [1_000_000 + turn])
        connection.execute("update orders set id = id + 1000000 where id = %s", [1_000_000 + turn - 5])


def wait_for_changes(database: Database) -> None:
    before = database.value("select sum(counter) from small")
    wait_until(lambda: database.value("select sum(counter) from small") > before + 1000, 60, what="changes to be made")


@pytest.mark.promise("after a killed driver nothing is lost and nothing written twice")
@pytest.mark.promise("each state is killed and restarted")
def test_the_driver_is_killed_in_the_middle_of_the_copy(shop: Database, tmp_path: Path) -> None:
    with pipeline_process(shop, tmp_path) as run, silent_proxy(shop.settings) as proxy:
        run.connect_through(proxy.port)
        # Rows have come, and the copy does not end before it is looked at.
        proxy.silence_at(b'FROM ONLY "public"."orders"', answer_bytes=1 << 20)
        with writing(shop):
            run.start()
            wait_until(proxy.silenced.is_set, 240, what="the copy to run", still_good=run.still_running)
            run.kill()
            proxy.resume()
            run.start()
            run.wait_ready(2, READY_SECONDS)
        run.wait_caught_up()
        assert run.stop() == 0, run.output
        run.assert_equal("orders", "small")


@pytest.mark.promise("each state is killed and restarted")
@pytest.mark.slow
def test_the_driver_is_killed_in_the_middle_of_a_group_of_small_tables(database: Database, tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(8)]
    for name in names:
        database.execute(f"create table {name}(id int primary key, counter int not null)")
        database.execute(f"insert into {name} select i, 1 from generate_series(1, 100) i")
    database.execute("create publication shop for all tables")
    with pipeline_process(database, tmp_path) as run:
        run.start()
        wait_until(
            lambda: "finished_copy" in run.states(),
            240,
            what="a copy of the group to end",
            still_good=run.still_running,
        )
        run.kill()
        for name in names:
            database.execute(f"update {name} set counter = 2 where id <= 50; delete from {name} where id > 90")
        run.start()
        run.wait_ready(len(names), READY_SECONDS)
        run.wait_caught_up()
        assert run.stop() == 0, run.output
        run.assert_equal(*names)


@pytest.mark.promise("after a killed driver nothing is lost and nothing written twice")
@pytest.mark.promise("each state is killed and restarted")
def test_the_driver_is_killed_in_the_middle_of_streaming(shop: Database, tmp_path: Path) -> None:
    with pipeline_process(shop, tmp_path) as run:
        run.start()
        run.wait_ready(2, READY_SECONDS)
        with writing(shop):
            for _ in range(2):
                wait_for_changes(shop)
                run.kill()
                run.start()
            run.wait_ready(2, READY_SECONDS)
        run.wait_caught_up()
        assert run.stop() == 0, run.output
        run.assert_equal("orders", "small")


def test_the_jvm_alone_is_killed_and_the_process_says_so_and_exits_1(shop: Database, tmp_path: Path) -> None:
    with pipeline_process(shop, tmp_path) as run:
        run.start()
        run.wait_ready(2, READY_SECONDS)
        with writing(shop):
            wait_for_changes(shop)
            run.kill_jvm()
            assert run.wait() == 1, run.output
            assert "the JVM that runs Spark has ended" in run.output
            run.start()
            run.wait_ready(2, READY_SECONDS)
        run.wait_caught_up()
        assert run.stop() == 0, run.output
        run.assert_equal("orders", "small")
