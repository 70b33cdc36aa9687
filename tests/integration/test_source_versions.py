"""Every question we ask a source, asked of every version we support."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.contracts.stores import APPLY
from headwater.lsn import EndLsn
from headwater.source.catalog import load_table_schemas
from headwater.source.catalog_look import read_fingerprints
from headwater.source.fingerprint import from_text, to_text
from headwater.source.lock import PipelineLock, is_locked
from headwater.source.preflight import Severity, run_preflight
from headwater.source.publication import published_tables
from headwater.source.rows import read_rows
from headwater.source.server import flush_lsn, server_facts
from headwater.source.session import connect
from headwater.source.slot_check import SlotVerdict, blockers, check_apply_slot
from headwater.source.slots import drop_slot, inspect_slot, sync_slots
from headwater.source.timeline import server_history
from headwater.states import DATA_SYNC, INIT
from headwater.store.postgres import PostgresStore
from headwater.testing.binaries import PINNED
from headwater.testing.store_samples import A
from headwater.wire.connection import WireConnection
from tests.conftest import Database

pytestmark = pytest.mark.versions(*sorted(PINNED))


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
def test_every_question_has_an_answer(database: Database) -> None:
    with connect(database.settings) as session:
        session.execute(
            "create table public.t (id int primary key, twice int generated always as (id * 2) stored, x text)"
        )
        session.execute("create table public.m (id int primary key) partition by range (id)")
        session.execute("create table public.m1 partition of public.m for values from (0) to (10)")
        session.execute("insert into public.t (id, x) values (1, 'a')")
        session.execute("create publication p for all tables with (publish_via_partition_root = true)")
        tables = published_tables(session, "p")
        assert [str(table.name) for table in tables] == ["public.m", "public.t"]
        schemas = load_table_schemas(session, [table.id for table in tables], "p")
        schema = schemas[tables[1].id]
        assert [column.name for column in schema.columns] == ["id", "x"]
        assert read_rows(session, schema, pa.table({"id": pa.array([1, 2], pa.int32())})).rows.to_pylist() == [
            {"id": 1, "x": "a"}
        ]
        looked = read_fingerprints(session, "p")
        assert [str(looked[table.id].table_name) for table in tables] == ["public.m", "public.t"]
        assert [(part.name, part.born) for part in looked[tables[0].id].parts] == [("m1", True)]
        assert all(from_text(to_text(found)) == found for found in looked.values())
        assert not is_locked(session, 1)
        findings = run_preflight(session, "p", pipeline_id=1)
        assert [finding for finding in findings if finding.severity is Severity.ERROR] == []
        session.execute("select pg_create_logical_replication_slot('headwater_sync_1_5', 'pgoutput')")
        facts = inspect_slot(session, "headwater_sync_1_5")
        assert sync_slots(session, 1) == [facts]
        server_now, flush = server_facts(session), flush_lsn(session)
        with WireConnection.connect(database.settings, replication=True) as replication:
            history = server_history(replication)
        assert (history.system_identifier, history.timeline) == (server_now.system_identifier, server_now.timeline)
        assert check_apply_slot(facts, None, server_now, flush, history) is SlotVerdict.RESUME
        assert drop_slot(session, facts.name, wait_seconds=1)
        assert blockers(session) == []


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
def test_lock_and_store_work(database: Database) -> None:
    lock = PipelineLock(database.settings, 1)
    lock.acquire()
    lock.check()
    lock.release()
    store = PostgresStore(database.settings, 1)
    store.start()
    store.update_table_states([(A, INIT)])
    store.update_table_states([(A, DATA_SYNC)])
    assert store.rollback_table_state(A) == INIT
    assert store.upsert_replication_progress(APPLY, EndLsn(9)) == EndLsn(9)
    assert store.reset_table_states_for_resync() == 1
    store.delete_table_state(A)
    assert store.load_table_states() == 0
    assert store.exists()
    assert store.remove()
    assert not store.exists()
    store.close()
