"""What only the store in Postgres promises: few writes, one schema however often migrated, a new session when one is lost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from headwater.contracts.stores import APPLY, Lineage
from headwater.errors import HeadwaterError, StoreError, StoreUnavailable
from headwater.lsn import EndLsn
from headwater.schema.table import SnapshotId, TableId
from headwater.secret import Secret
from headwater.source.session import connect
from headwater.states import DATA_SYNC, INIT, READY, errored
from headwater.store.migrate import Migration, apply_migrations, read_migrations
from headwater.store.postgres import PostgresStore
from headwater.testing.postgres import PostgresServer
from headwater.testing.store_samples import table_metadata, table_schema

A = TableId(16384)

_TABLES = """
select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid), c.reloptions
from pg_class c join pg_attribute a on a.attrelid = c.oid left join pg_attrdef d on (d.adrelid, d.adnum) = (c.oid, a.attnum)
where c.relnamespace = 'headwater'::regnamespace and a.attnum > 0 order by 1, a.attnum
"""


@pytest.fixture
def store(database: Any) -> Iterator[PostgresStore]:
    store = PostgresStore(database.settings, 1)
    store.start()
    yield store
    store.close()


def end_sessions(database: Any) -> None:
    database.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where application_name = 'headwater_store_1' and datname = current_database()"
    )


@pytest.mark.promise("migrations replay to the same schema")
def test_migrations_replay_to_the_same_schema(database: Any, store: PostgresStore) -> None:
    before, recorded = database.execute(_TABLES), database.execute("select * from headwater.migrations")
    assert {row[0] for row in before} >= {"migrations", "table_states", "table_schemas", "replication_progress"}
    for _ in range(2):
        store.start()
    assert database.execute("select * from headwater.migrations") == recorded
    database.execute("drop schema headwater cascade")
    store.start()
    assert database.execute(_TABLES) == before


def test_stores_that_start_together_migrate_once(database: Any) -> None:
    stores = [PostgresStore(database.settings, pipeline_id) for pipeline_id in range(6)]
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(PostgresStore.start, stores))
    for store in stores:
        store.close()
    migrations = read_migrations(resources.files("headwater.store").joinpath("migrations"))
    assert database.value("select count(*) from headwater.migrations") == len(migrations)


def test_a_migration_that_fails_leaves_nothing(database: Any) -> None:
    broken = [
        Migration(1, "good", "create table headwater.x (id int)"),
        Migration(2, "bad", "create table headwater.y ()"),
    ]
    broken.append(Migration(3, "worse", "create table headwater.z (); select 1/0"))
    with connect(database.settings) as session:
        with pytest.raises(Exception, match="division by zero"):
            apply_migrations(session, "test", broken)
        assert database.execute("select version from headwater.migrations order by 1") == [(1,), (2,)]
        assert database.value("select to_regclass('headwater.z')") is None
        with pytest.raises(StoreError, match="newer version"):
            apply_migrations(session, "test", broken[:1])


def test_our_migrations_are_numbered_without_gaps() -> None:
    assert read_migrations(resources.files("headwater.store").joinpath("migrations"))


def test_what_is_on_record_is_not_written_again(database: Any, store: PostgresStore) -> None:
    def everything() -> None:
        store.start()
        store.update_table_states([(A, INIT), (TableId(2), READY)])
        store.store_destination_table_metadata(A, table_metadata("a"))
        store.store_table_schema(table_schema(A, 100))
        store.upsert_replication_progress(APPLY, EndLsn(100))
        store.upsert_replication_progress(APPLY, EndLsn(50))
        store.record_lineage(Lineage("7", 1))
        store.get_replication_progress(APPLY)
        store.get_table_schema(A, SnapshotId(5))

    everything()
    rows = "select ctid, xmin, * from headwater.{}"
    tables = ("table_states", "destination_tables", "table_schemas", "replication_progress", "lineages", "migrations")
    before = [database.execute(rows.format(table)) for table in tables]
    everything()
    again = PostgresStore(database.settings, 1)
    again.start()
    again.update_table_states([(A, INIT)])
    again.store_destination_table_metadata(A, table_metadata("a"))
    again.close()
    assert [database.execute(rows.format(table)) for table in tables] == before
    with pytest.raises(StoreError, match="no earlier state"):
        store.rollback_table_state(A)


def test_a_lost_session_is_opened_again_without_a_word(database: Any, store: PostgresStore) -> None:
    store.update_table_state(A, INIT)
    end_sessions(database)
    store.update_table_state(A, DATA_SYNC)
    end_sessions(database)
    assert store.upsert_replication_progress(APPLY, EndLsn(7)) == EndLsn(7)
    end_sessions(database)
    assert store.rollback_table_state(A) == INIT
    end_sessions(database)
    store.prepare_table_state_for_copy(A)
    assert database.value("select state ->> 'phase' from headwater.table_states") == "init"


@pytest.mark.invariant(15)
def test_an_unreachable_server_raises_store_unavailable_until_it_is_reachable() -> None:
    with PostgresServer.start() as server:
        store = PostgresStore(server.settings(), 1)
        store.start()
        store.update_table_state(A, INIT)
        server.stop()
        with pytest.raises(StoreUnavailable) as away:
            store.update_table_state(A, READY)
        assert away.value.detail
        assert away.value.hint
        assert store.get_table_state(A) == INIT, "the cache is still there, and says what is on record"
        server.restart()
        store.update_table_state(A, READY)
        store.load_table_states()
        assert store.get_table_state(A) == READY
        store.close()


@pytest.mark.invariant(16)
def test_errors_show_no_password_and_say_what_to_do(database: Any) -> None:
    wrong = PostgresStore(replace(database.settings, password=Secret("s3cret-and-wrong")), 1)
    with pytest.raises(StoreError) as refused:
        wrong.start()
    assert "s3cret" not in str(refused.value)
    assert not isinstance(refused.value, StoreUnavailable)
    unstarted = PostgresStore(database.settings, 1)
    with pytest.raises(StoreError) as missing:
        unstarted.load_table_states()
    assert "start()" in missing.value.hint
    unstarted.close()


def test_other_peoples_text_is_kept_as_far_as_json_can(database: Any, store: PostgresStore) -> None:
    store.update_table_state(A, errored(HeadwaterError("nul \0, half \ud800, back \\u0000 slash, ü", hint='"')))
    store.load_table_states()
    state = store.get_table_state(A)
    assert state is not None
    assert state.reason == "nul \N{REPLACEMENT CHARACTER}, half ?, back \\u0000 slash, ü"


def test_the_history_is_bounded(database: Any, store: PostgresStore) -> None:
    for _ in range(20):
        store.update_table_state(A, INIT)
        store.update_table_state(A, DATA_SYNC)
    assert database.value("select jsonb_array_length(history) from headwater.table_states") == 16


def test_a_reset_leaves_nothing_to_roll_back_to(store: PostgresStore) -> None:
    for state in (INIT, DATA_SYNC, READY):
        store.update_table_state(A, state)
    store.reset_table_states_for_resync()
    with pytest.raises(StoreError, match="no earlier state"):
        store.rollback_table_state(A)


def test_the_session_is_named_pinned_and_durable(database: Any) -> None:
    database.execute(f'alter database "{database.name}" set synchronous_commit = off')
    store = PostgresStore(database.settings, 1)
    store.start()
    found = store._connection.use(
        lambda session: session.execute(
            "select current_setting('application_name'), current_setting('synchronous_commit'),"
            " current_setting('search_path'), current_setting('statement_timeout')"
        ).fetchone()
    )
    store.close()
    assert found == ("headwater_store_1", "on", "pg_catalog", "0")
