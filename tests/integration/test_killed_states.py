"""The driver is killed in every state of a table, just before and just after it is recorded, and started again.

Without Spark, into a file that outlives the process: a kill costs two or three seconds.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.schema.table import TableId
from headwater.source.slots import apply_slot_name
from headwater.states import INIT, Phase, state_from_json
from headwater.store.postgres import PostgresStore
from headwater.testing.faults import Moment
from tests.background_writes import writing_by
from tests.commands import write_settings
from tests.conftest import Database
from tests.file_destination import CounterChanges, FileDestination
from tests.integration.running_pipeline import config, running_pipeline

pytestmark = [pytest.mark.crash, pytest.mark.timeout(120)]

IN_MEMORY = (Phase.SYNC_WAIT, Phase.CATCHUP)
AFTER = [(phase, Moment.AFTER) for phase in Phase]
BEFORE = [(phase, Moment.BEFORE) for phase in Phase if phase not in IN_MEMORY]


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        """
        create table orders(id int primary key, counter int not null, day date);
        create table items(id int primary key, counter int not null, note text);
        create publication shop for table orders, items;
        """
    )
    return database


def killed(shop: Database, directory: Path, phase: Phase, moment: Moment) -> None:
    """Run until the fault point, and make sure that it was what ended the process."""
    file, table = write_settings(shop, directory), shop.value("select 'orders'::regclass::oid::int")
    command = [sys.executable, "-m", "tests.integration.engine_process", file, directory / "destination.db"]
    with (directory / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [*map(str, command), str(table), phase.value, moment.value], stdout=output, stderr=output
        )
        try:
            status = process.wait(60)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        assert status == -signal.SIGKILL, output.read()


def recorded(shop: Database) -> Phase | None:
    rows = shop.execute("select state from headwater.table_states where table_id = 'orders'::regclass::oid")
    return state_from_json(rows[0][0]).phase if rows else None


def mend(shop: Database, table: TableId) -> None:
    """What `headwater rollback` does, once the value that the lake cannot hold is gone."""
    shop.execute("delete from orders where id = -1")
    store = PostgresStore(shop.settings, 1)
    store.load_table_states()
    store.update_table_state(table, INIT)
    store.close()


LAST_ON_RECORD = {
    Phase.INIT: None,
    Phase.DATA_SYNC: Phase.INIT,
    Phase.FINISHED_COPY: Phase.DATA_SYNC,
    Phase.SYNC_WAIT: Phase.FINISHED_COPY,
    Phase.CATCHUP: Phase.FINISHED_COPY,
    Phase.SYNC_DONE: Phase.FINISHED_COPY,
    Phase.READY: Phase.SYNC_DONE,
    Phase.ERRORED: Phase.DATA_SYNC,
}
"""What the store has before a state is recorded, and instead of one that never is."""


@pytest.mark.promise("after a killed driver nothing is lost and nothing written twice")
@pytest.mark.promise("each state is killed and restarted")
@pytest.mark.promise("no change is lost or doubled, whoever is quicker")
@pytest.mark.invariant(5)
@pytest.mark.parametrize(("phase", "moment"), AFTER + BEFORE, ids=lambda value: str(value))
def test_each_state_is_killed_and_restarted_and_no_change_is_lost_or_doubled(
    shop: Database, tmp_path: Path, phase: Phase, moment: Moment
) -> None:
    if phase is Phase.ERRORED:
        shop.execute("insert into orders values (-1, 0, 'infinity')")
    table, destination = (
        TableId(shop.value("select 'orders'::regclass::oid::int")),
        FileDestination(tmp_path / "destination.db"),
    )
    counting, store = CounterChanges("orders", "items"), PostgresStore(shop.settings, 1)
    with writing_by(shop, counting, pace_seconds=0.002):
        killed(shop, tmp_path, phase, moment)
    on_record = moment is Moment.AFTER and phase not in IN_MEMORY
    assert recorded(shop) is (phase if on_record else LAST_ON_RECORD[phase])
    copies = destination.copies("orders")
    with running_pipeline(shop, config(shop), store, destination) as run:
        with writing_by(shop, counting, pace_seconds=0.002):
            if phase is Phase.ERRORED:
                run.wait_for(lambda: run.states()["public.orders"] == "errored")
                mend(shop, table)
            run.wait_states("ready", 2)
            changes = run.pipeline.progress.snapshot().changes
            run.wait_for(lambda: run.pipeline.progress.snapshot().changes > changes + 50)
        run.wait_caught_up()
        destination.assert_equal(shop, "orders", "items")
        destination.assert_every_step_once("orders", "items")
    handed_over = phase is Phase.READY or (phase is Phase.SYNC_DONE and on_record)
    assert destination.copies("orders") == copies + (0 if handed_over else 1)
    slots = shop.execute("select slot_name from pg_replication_slots where database = current_database()")
    assert slots == [(apply_slot_name(1),)]
