"""The lag that is shown is the real one: to where the server is, however little of that we hold."""

from __future__ import annotations

import threading

from headwater.events import EventBatch
from headwater.source.slots import apply_slot_name
from headwater.testing.compare import confirmed_position, flush_position
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import running

_CHANGES = 120
_FILL = "update orders set filler = (select string_agg(md5(random()::text), '') from generate_series(1, 32768))"


def test_lag_is_that_of_the_server_while_a_destination_holds_everything_up(database: Database) -> None:
    """Far more WAL than the reader's queue and a batch may hold."""
    database.execute("create table orders(id int primary key, filler text not null)")
    database.execute("alter table orders alter filler set storage external")
    database.execute("insert into orders values (1, '')")
    database.execute("create publication shop for table orders")
    destination, go_on = MemoryTables(), threading.Event()

    def hold(batch: EventBatch) -> None:
        assert go_on.wait(120)

    destination.before_events = hold
    with running(database, destination) as run:
        try:
            run.wait_states("ready", 1)
            run.wait_caught_up()
            for _ in range(_CHANGES):
                database.execute(_FILL)
            real = flush_position(database.connection) - confirmed_position(database.connection, apply_slot_name(1))
            assert real > _CHANGES << 20
            progress = run.pipeline.progress
            run.wait_for(lambda: progress.snapshot().lag_bytes >= real)
            assert progress.snapshot().received < flush_position(database.connection) - (32 << 20)
        finally:
            go_on.set()
        run.wait_caught_up()
        run.wait_for(lambda: progress.snapshot().lag_bytes == 0)
        run.assert_equal("orders")
