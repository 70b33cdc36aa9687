"""A next attempt that is on record for tomorrow, because the wall clock was set back since, is made today."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from headwater.errors import DestinationError
from headwater.states import errored, state_to_json
from headwater.store.postgres import PostgresStore
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import running


def test_a_clock_that_was_set_back_by_a_day_does_not_put_off_a_retry_by_a_day(database: Database) -> None:
    database.execute("create table orders(id int primary key, n int); create publication shop for table orders")
    database.execute("insert into orders select i, i from generate_series(1, 50) i")
    destination = MemoryTables()
    with running(database, destination, PostgresStore(database.settings, 1)) as run:
        run.wait_states("ready", 1)
        run.stop()
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    state = errored(DestinationError("no"), attempts=1, next_retry=tomorrow)
    database.execute("update headwater.table_states set state = %s", [json.dumps(state_to_json(state))])
    with running(database, destination, PostgresStore(database.settings, 1)) as run:
        run.wait_states("ready", 1)
        database.execute("update orders set n = 0")
        run.wait_caught_up()
        run.assert_equal("orders")
