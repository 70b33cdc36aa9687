"""The store's session is lost in the middle of each operation: all of it is there afterwards, or nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headwater.contracts.stores import APPLY, TableSchemaRetention, WorkerType
from headwater.errors import StoreUnavailable
from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.states import DATA_SYNC, INIT, READY
from headwater.store.postgres import PostgresStore
from headwater.testing.store_samples import table_metadata, table_schema
from tests.conftest import Database

A, B = TableId(100), TableId(200)
TABLES = ("table_states", "table_schemas", "destination_tables", "replication_progress")

# The session ends itself at a row that a statement is about to write. A sequence counts rows, because it is not rolled back.
FAULT = """
create sequence public.writes;
create table public.fault(first int, last int);
create function public.break_off() returns trigger language plpgsql as $$
declare number int := nextval('public.writes');
begin
    if exists (select from public.fault where number between first and last) then
        perform pg_terminate_backend(pg_backend_pid());
    end if;
    return coalesce(new, old);
end $$;
"""

OPERATIONS: dict[str, Callable[[PostgresStore], object]] = {
    "update states": lambda store: store.update_table_states([(A, DATA_SYNC), (B, DATA_SYNC)]),
    "roll a state back": lambda store: store.rollback_table_state(A),
    "store a schema": lambda store: store.store_table_schema(table_schema(A, 300)),
    "prune schemas": lambda store: store.prune_table_schemas({A: TableSchemaRetention(EndLsn(250))}),
    "store metadata": lambda store: store.store_destination_tables_metadata(
        {A: table_metadata("x", 0x2000000), B: table_metadata("y", 0x2000000)}
    ),
    "record progress": lambda store: store.upsert_replication_progress(APPLY, EndLsn(5000)),
    "delete progress": lambda store: store.delete_replication_progress(WorkerType(A)),
    "delete a table": lambda store: store.delete_table_state(A),
    "prepare a copy": lambda store: store.prepare_table_state_for_copy(A),
    "reset for a resync": lambda store: store.reset_table_states_for_resync(),
}


def filled(database: Database, pipeline_id: int) -> PostgresStore:
    store = PostgresStore(database.settings, pipeline_id)
    store.start()
    for table in (A, B):
        store.update_table_state(table, INIT)
        store.update_table_state(table, READY)
        for snapshot in (100, 200):
            store.store_table_schema(table_schema(table, snapshot))
        store.store_destination_tables_metadata({table: table_metadata(f"t{table}")})
        store.upsert_replication_progress(WorkerType(table), EndLsn(1000))
    store.upsert_replication_progress(APPLY, EndLsn(1000))
    store.load_table_schemas()
    return store


def on_record(database: Database, pipeline_id: int) -> list[tuple[object, ...]]:
    """All of a pipeline, without its number and without when it was written."""
    rows: list[tuple[object, ...]] = []
    for table in TABLES:
        rows += database.execute(
            f"select '{table}', (to_jsonb(t) - 'updated_at' - 'pipeline_id')::text from headwater.{table} t "
            "where pipeline_id = %s order by 2",
            [pipeline_id],
        )
    return rows


def break_off(database: Database, first: int, last: int) -> None:
    """The session is lost at each of these row writes, counted from now on."""
    database.execute("select setval('public.writes', 1, false)")
    database.execute("delete from public.fault")
    database.execute("insert into public.fault values (%s, %s)", [first, last])


@pytest.mark.promise("every lifecycle operation is atomic")
@pytest.mark.invariant(15)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_session_lost_in_the_middle_of_each_operation_leaves_all_of_it_or_nothing(
    database: Database, name: str
) -> None:
    operation, disturbed, undisturbed = OPERATIONS[name], filled(database, 1), filled(database, 2)
    database.execute(FAULT)
    for table in TABLES:
        database.execute(
            f"create trigger break_off before insert or update or delete on headwater.{table} "
            "for each row execute function public.break_off()"
        )
    break_off(database, 0, 0)
    operation(undisturbed)
    rows = database.value("select last_value from public.writes")
    wanted, before = on_record(database, 2), on_record(database, 1)
    assert wanted != before
    # Lost at the last row, and the second attempt at its first: nothing may be left of either.
    break_off(database, rows, 1000)
    with pytest.raises(StoreUnavailable):
        operation(disturbed)
    assert on_record(database, 1) == before
    # Lost once: the second attempt is whole, and nobody notices.
    break_off(database, rows, rows)
    operation(disturbed)
    assert database.value("select last_value from public.writes") == 2 * rows
    assert on_record(database, 1) == wanted
    disturbed.close()
    undisturbed.close()
