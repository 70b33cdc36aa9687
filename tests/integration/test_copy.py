"""The copy against a real server: ranges, locks, snapshots, and the DataFrame over them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
import trustme

from headwater.errors import ConnectionLost, PrivilegeError, Retry, SchemaError, SourceError
from headwater.schema.arrow import arrow_schema
from headwater.secret import Secret
from headwater.source import copy_read
from headwater.source.catalog import load_table_schemas
from headwater.source.copy_plan import plan_copy
from headwater.source.copy_read import copy_batches, read_ranges
from headwater.source.exported_snapshot import ExportedSnapshot, exported_snapshot
from headwater.source.publication import PublishedTable, published_tables
from headwater.source.table_lock import table_lock
from headwater.spark.copy_source import copy_dataframe, register_copy_source, task_limit
from headwater.testing.compare import wait_until
from headwater.testing.postgres import PostgresServer
from headwater.testing.server_files import TRUSTED_SOCKET, ServerTls
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls_config import TlsConfig, TlsMode
from tests.conftest import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL_RANGES = 256 << 10

# Spark leaves the socket of a collected result to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@contextmanager
def snapshot_of(
    database: Database, *tables: str, filter: str = "", range_bytes: int = SMALL_RANGES
) -> Iterator[ExportedSnapshot]:
    """All tables in many small ranges, at one moment."""
    database.execute(f"CREATE PUBLICATION shop FOR TABLE {', '.join(tables)}{filter}")
    with exported_snapshot(database.settings, "shop", target_range_bytes=range_bytes, parallelism=2) as snapshot:
        yield snapshot


def read(snapshot: ExportedSnapshot, table: str) -> list[tuple[Any, ...]]:
    planned = snapshot.tables[table]
    return rows(copy_batches(snapshot.settings, snapshot.snapshot_name, planned.plan, planned.schema))


def rows(batches: Iterable[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    return [row for batch in batches for row in zip(*(c.to_pylist() for c in batch.columns), strict=True)]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


ORDERS = """
CREATE TABLE orders (id bigint PRIMARY KEY, small smallint, customer int, amount numeric(12,2), rate float8, note text,
    created timestamptz, local timestamp, day date, paid bool, raw bytea, tags text[], ref uuid, doc jsonb, address inet,
    addresses inet[], free numeric);
INSERT INTO orders SELECT i, i % 100, nullif(i % 7, 0), (i % 100000) / 100.0, i / 3.0, nullif('note ' || i, 'note 5'),
    '2024-01-01Z'::timestamptz + i * interval '1 s', '2024-01-01'::timestamp + i * interval '1 ms',
    '2024-01-01'::date + i % 999, i % 2 = 0, decode(lpad(to_hex(i), 8, '0'), 'hex'), ARRAY['a' || i, NULL, '{"x,'],
    md5(i::text)::uuid, jsonb_build_object('i', i), '10.0.0.1'::inet + i, ARRAY['10.0.0.1'::inet, NULL], i / 7.0
FROM generate_series(1, 100000) i;
"""


@pytest.mark.promise("100,000 rows are exact with parallel ranges")
def test_a_hundred_thousand_rows_in_parallel_ranges_are_exact(database: Database, spark: SparkSession) -> None:
    database.execute(ORDERS)
    expected = database.execute(
        """SELECT id, small, customer, amount, rate, note, created AT TIME ZONE 'UTC', local, day, paid, raw, tags, ref::text,
           doc::text, host(address), addresses::text, free::text FROM orders ORDER BY id"""
    )
    with snapshot_of(database, "orders", range_bytes=4 << 20) as snapshot:
        planned = snapshot.tables["public.orders"]
        frame = copy_dataframe(spark, snapshot.settings, snapshot.snapshot_name, planned.plan, planned.schema, 4)
        assert frame.rdd.getNumPartitions() > 4
        copied = frame.toArrow()
        register_copy_source(spark, snapshot)
        through_source = spark.read.format("postgres_copy").options(**snapshot.options("public.orders")).load()
        assert through_source.schema == frame.schema
        assert through_source.toArrow().sort_by("id").equals(copied.sort_by("id"))
        snapshot.check()
    index = copied.schema.get_field_index("created")
    copied = copied.set_column(index, "created", copied.column(index).cast(pa.timestamp("us")))
    found = sorted(rows(copied.to_batches()))
    assert len(found) == len(expected)
    assert [(one, other) for one, other in zip(found, expected, strict=True) if one != other][:3] == []


@pytest.mark.versions
def test_a_batch_has_exactly_the_declared_schema(database: Database) -> None:
    database.execute(ORDERS.replace("100000)", "100)"))
    with snapshot_of(database, "orders") as snapshot:
        planned = snapshot.tables["public.orders"]
        batches = list(copy_batches(snapshot.settings, snapshot.snapshot_name, planned.plan, planned.schema))
    assert {batch.schema for batch in batches} == {arrow_schema(planned.schema)}


@pytest.mark.promise("rows written during the copy are neither lost nor doubled")
@pytest.mark.versions
def test_rows_changed_during_the_copy_are_neither_lost_nor_doubled(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, 0 FROM generate_series(1, 50000) i"
    )
    with snapshot_of(database, "t") as snapshot:
        planned = snapshot.tables["public.t"]
        assert len(planned.plan.ranges) > 4
        found: list[tuple[Any, ...]] = []
        for number, copy_range in enumerate(planned.plan.ranges):
            database.execute(f"UPDATE t SET v = v + 1 WHERE id % 5 = {number % 5}")
            database.execute(f"DELETE FROM t WHERE id % 11 = {number % 11}")
            database.execute(
                f"INSERT INTO t SELECT i, 7 FROM generate_series({100000 + number * 9}, {100008 + number * 9}) i"
            )
            database.execute("VACUUM t")
            found += rows(read_ranges(snapshot.origin("public.t"), [copy_range]))
        snapshot.check()
    assert sorted(found) == [(i, 0) for i in range(1, 50001)]


@pytest.mark.versions
def test_an_attempt_that_is_made_again_reads_the_same_rows(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 50000)")
    with snapshot_of(database, "t") as snapshot:
        planned = snapshot.tables["public.t"]
        first = read_ranges(snapshot.origin("public.t"), planned.plan.ranges, chunk_bytes=64 << 10)
        next(first)
        database.execute("DELETE FROM t WHERE id % 2 = 0")
        first.close()  # type: ignore[attr-defined]
        assert sorted(read(snapshot, "public.t")) == [(i,) for i in range(1, 50001)]


@pytest.mark.parametrize(
    "statement", ["VACUUM FULL t", "ALTER TABLE t ALTER v TYPE bigint", "TRUNCATE t", "DROP TABLE t"]
)
def test_invariant_1_what_would_rewrite_the_table_waits_for_the_copy(database: Database, statement: str) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, i FROM generate_series(1, 20000) i"
    )
    with database.connect() as rewriting:
        with snapshot_of(database, "t") as snapshot:
            planned = snapshot.tables["public.t"]
            # Small chunks: the session has read a little, holds its lock and has most of the table before it.
            reading = read_ranges(snapshot.origin("public.t"), planned.plan.ranges, chunk_bytes=64 << 10)
            found = rows([next(reading)])
            thread = threading.Thread(target=rewriting.execute, args=(statement,))
            thread.start()
            wait_until_blocked(database, rewriting, snapshot)
            found += rows(reading)
            snapshot.check()
            assert thread.is_alive()
        thread.join()
    assert sorted(found) == [(i, i) for i in range(1, 20001)]


def test_a_range_that_queues_behind_a_rewrite_ends_the_copy_instead_of_waiting_for_ever(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(copy_read._SESSION, "lock_timeout", "50ms")
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 20000)")
    with database.connect() as rewriting:
        with snapshot_of(database, "t") as snapshot:
            thread = threading.Thread(target=rewriting.execute, args=("ALTER TABLE t ADD v int DEFAULT 7",))
            thread.start()
            wait_until_blocked(database, rewriting, snapshot)
            with pytest.raises(SourceError, match=r"waiting for an ACCESS EXCLUSIVE lock on public\.t") as caught:
                read(snapshot, "public.t")
            assert caught.value.retry is Retry.TIMED
        thread.join()
    with exported_snapshot(database.settings, "shop") as snapshot:
        assert sorted(read(snapshot, "public.t")) == [(i, 7) for i in range(1, 20001)]


def wait_until_blocked(database: Database, session: psycopg.Connection[Any], snapshot: ExportedSnapshot) -> None:
    pids = (snapshot.lock.backend_pid, session.info.backend_pid)
    eventually(lambda: bool(database.value("SELECT %s = ANY(pg_blocking_pids(%s))", pids)))


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
@pytest.mark.promise(
    "partitioned roots, nested partitions and single leaves, with and without publish_via_partition_root"
)
@pytest.mark.versions
def test_a_partitioned_table_is_read_leaf_by_leaf_whatever_the_order_of_their_columns(database: Database) -> None:
    database.execute(
        """
        CREATE TABLE p (id int, region text, v int) PARTITION BY LIST (region);
        CREATE TABLE p_a PARTITION OF p FOR VALUES IN ('a');
        CREATE TABLE p_b (gone int, v int, region text, id int);
        ALTER TABLE p_b DROP gone;
        ALTER TABLE p ATTACH PARTITION p_b FOR VALUES IN ('b');
        CREATE TABLE p_c PARTITION OF p FOR VALUES IN ('c', 'd') PARTITION BY LIST (region);
        CREATE TABLE p_cc PARTITION OF p_c FOR VALUES IN ('c');
        CREATE TABLE p_cd PARTITION OF p_c FOR VALUES IN ('d');
        INSERT INTO p SELECT i, chr(97 + i % 4), -i FROM generate_series(1, 20000) i;
        """
    )
    with database.connect() as session:
        with snapshot_of(database, "p", filter=" WITH (publish_via_partition_root = true)") as snapshot:
            leaves = {str(r.relation) for r in snapshot.tables["public.p"].plan.ranges}
            assert leaves == {"public.p_a", "public.p_b", "public.p_cc", "public.p_cd"}
            assert sorted(read(snapshot, "public.p")) == [(i, chr(97 + i % 4), -i) for i in range(1, 20001)]
            thread = threading.Thread(target=session.execute, args=("TRUNCATE p_cd",))
            thread.start()
            wait_until_blocked(database, session, snapshot)
        thread.join()


def test_a_leaf_attached_under_the_lock_is_planned_and_locked(database: Database) -> None:
    database.execute(
        """
        CREATE TABLE p (id int) PARTITION BY RANGE (id);
        CREATE TABLE late (id int);
        INSERT INTO late VALUES (1);
        CREATE PUBLICATION shop FOR TABLE p WITH (publish_via_partition_root = true);
        """
    )
    with exported_snapshot(database.settings, "shop") as snapshot:
        assert snapshot.tables["public.p"].plan.ranges == ()
        assert read(snapshot, "public.p") == []
        table = published(snapshot, "p")
        database.execute("ALTER TABLE p ATTACH PARTITION late FOR VALUES FROM (0) TO (10)")
        plan = snapshot.lock.plan(table, snapshot.tables["public.p"].schema)
        assert [str(r.relation) for r in plan.ranges] == ["public.late"]
        assert database.value("SELECT count(*) FROM pg_locks WHERE relation = 'late'::regclass") == 1


def published(snapshot: ExportedSnapshot, name: str) -> PublishedTable:
    return next(t for t in published_tables(snapshot.lock.connection, "shop") if t.name.name == name)


@pytest.mark.promise("row filters and column lists are honoured in copy and stream")
@pytest.mark.versions
def test_row_filters_and_column_lists_of_the_publication_hold(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, secret text, v int); INSERT INTO t SELECT i, 's', i FROM generate_series(1, 9000) i"
    )
    with snapshot_of(database, "t (id, v)", filter=" WHERE (id % 3 = 0 OR id < 10)") as snapshot:
        assert all("secret" not in r.sql for r in snapshot.tables["public.t"].plan.ranges)
        assert sorted(read(snapshot, "public.t")) == [(i, i) for i in range(1, 9001) if i % 3 == 0 or i < 10]


def test_rows_of_an_inheritance_child_are_not_the_parents(database: Database) -> None:
    database.execute("CREATE TABLE t (id int); CREATE TABLE child () INHERITS (t); INSERT INTO t VALUES (1)")
    database.execute("INSERT INTO child VALUES (2)")
    with snapshot_of(database, "ONLY t") as snapshot:
        assert read(snapshot, "public.t") == [(1,)]


@pytest.mark.promise("empty tables are created")
def test_an_empty_table_gives_no_rows_and_its_schema(database: Database, spark: SparkSession) -> None:
    database.execute("CREATE TABLE t (id int, v text)")
    with snapshot_of(database, "t") as snapshot:
        planned = snapshot.tables["public.t"]
        frame = copy_dataframe(spark, snapshot.settings, snapshot.snapshot_name, planned.plan, planned.schema, 4)
        assert frame.toArrow().num_rows == 0
        assert frame.columns == ["id", "v"]


@pytest.mark.promise("names with quotes, spaces, capitals, unicode and 63 bytes")
def test_names_with_quotes_spaces_and_unicode(database: Database, spark: SparkSession) -> None:
    name = '"my ""ns"."Größe; 100%"'
    database.execute('CREATE SCHEMA "my ""ns"')
    database.execute(f'CREATE TABLE {name} ("a ""b" int, "a b" text, "Ünï%s" text, "A B" inet)')
    database.execute(f"INSERT INTO {name} VALUES (1, 'x', 'y', '::1')")
    with snapshot_of(database, name) as snapshot:
        (name,) = snapshot.tables
        assert read(snapshot, name) == [(1, "x", "y", "::1")]
        planned = snapshot.tables[name]
        frame = copy_dataframe(spark, snapshot.settings, snapshot.snapshot_name, planned.plan, planned.schema, 4)
        assert rows(frame.toArrow().to_batches()) == [(1, "x", "y", "::1")]


def test_a_composite_with_a_null_in_it_is_not_null(database: Database) -> None:
    database.execute("CREATE TYPE pair AS (a int, b int); CREATE TABLE t (id int, p pair)")
    database.execute("INSERT INTO t VALUES (1, (1, NULL)), (2, NULL), (3, (NULL, NULL))")
    with snapshot_of(database, "t") as snapshot:
        assert sorted(read(snapshot, "public.t")) == [(1, "(1,)"), (2, None), (3, "(,)")]


def test_a_view_cannot_be_copied_and_the_error_says_so(database: Database) -> None:
    database.execute("CREATE TABLE t (id int); CREATE VIEW v AS SELECT * FROM t")
    with snapshot_of(database, "t") as snapshot:
        table = published(snapshot, "t")
        view = replace(table, id=database.value("SELECT 'v'::regclass::oid::bigint"))
        with pytest.raises(SchemaError, match="cannot be copied") as caught:
            plan_copy(snapshot.lock.connection, view, snapshot.tables["public.t"].schema)
        assert "a view" in caught.value.detail


@pytest.mark.invariant(1)
def test_the_lock_says_when_its_session_died(database: Database) -> None:
    database.execute("CREATE TABLE t (id int)")
    with table_lock(database.settings, [database.value("SELECT 't'::regclass::oid::bigint")]) as lock:
        lock.check()
        database.value("SELECT pg_terminate_backend(%s, 10000)", (lock.backend_pid,))
        with pytest.raises(ConnectionLost, match="lock that protects a copy was lost"):
            lock.check()


@pytest.mark.promise("after a server restart nothing is lost and nothing written twice")
@pytest.mark.invariant(15)
def test_a_session_that_ends_while_it_waits_for_the_lock_is_a_lost_connection(database: Database) -> None:
    """A server that restarts meanwhile is no error of the table's."""
    database.execute("CREATE TABLE t(id int PRIMARY KEY)")
    table_id = database.value("SELECT 't'::regclass::oid::bigint")
    settings, caught = replace(database.settings, application_name="waits_for_the_lock"), list[BaseException]()

    def wait_for_the_lock() -> None:
        try:
            with table_lock(settings, [table_id]):
                pass
        except BaseException as error:
            caught.append(error)

    with database.connect() as other, other.transaction():
        other.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        waiting = threading.Thread(target=wait_for_the_lock)
        waiting.start()
        ended = """SELECT count(pg_terminate_backend(pid)) FROM pg_locks JOIN pg_stat_activity USING (pid)
                   WHERE NOT granted AND application_name = %s"""
        wait_until(lambda: database.value(ended, [settings.application_name]) == 1, 30)
        waiting.join(30)
    assert [type(error) for error in caught] == [ConnectionLost]


def test_the_lock_says_when_its_transaction_ended(database: Database) -> None:
    database.execute("CREATE TABLE t (id int)")
    with table_lock(database.settings, [database.value("SELECT 't'::regclass::oid::bigint")]) as lock:
        lock.connection.execute("COMMIT")
        with pytest.raises(ConnectionLost, match="lock that protects a copy was lost"):
            lock.check()


@pytest.mark.versions
def test_a_snapshot_whose_session_died_is_gone_and_the_copy_may_start_again(database: Database) -> None:
    database.execute("CREATE TABLE t (id int)")
    with snapshot_of(database, "t") as snapshot:
        database.execute(
            """SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database()
               AND pid <> ALL(%s) AND state = 'idle in transaction'""",
            ([database.connection.info.backend_pid, snapshot.lock.backend_pid],),
        )
        with pytest.raises(SourceError, match="does not exist any more") as caught:
            read(snapshot, "public.t")
        assert caught.value.retry is Retry.TIMED


def test_a_snapshot_of_another_run_of_the_server_is_refused_whatever_its_name(database: Database) -> None:
    database.execute("CREATE TABLE t (id int)")
    with snapshot_of(database, "t") as snapshot:
        origin = replace(snapshot.origin("public.t"), server_started_at="1.0")
        with pytest.raises(SourceError, match="does not exist any more"):
            list(read_ranges(origin, snapshot.tables["public.t"].plan.ranges))


@pytest.mark.promise(
    "Every major version from 15 to 18: connection, replication, slots, publication, copy, exported snapshot, and "
    "a whole pass of the engine"
)
@pytest.mark.versions
@pytest.mark.invariant(1)
def test_the_slot_is_made_under_the_lock_and_its_snapshot_serves_the_copy(database: Database) -> None:
    """As the engine does it. The lock session has no transaction id, so the slot does not wait for it."""
    database.execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1); CREATE PUBLICATION shop FOR TABLE t")
    table_id = database.value("SELECT 't'::regclass::oid::bigint")
    with (
        table_lock(database.settings, [table_id]) as lock,
        WireConnection.connect(database.settings, replication=True) as replication,
    ):
        (slot,) = replication.query("CREATE_REPLICATION_SLOT copy_test TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')")
        database.execute("INSERT INTO t VALUES (2)")
        schema = load_table_schemas(lock.connection, [table_id], "shop")[table_id]
        (table,) = published_tables(lock.connection, "shop")
        plan = lock.plan(table, schema)
        assert rows(copy_batches(database.settings, slot["snapshot_name"] or "", plan, schema)) == [(1,)]
        lock.check()


def test_a_table_that_may_not_be_read_is_a_privilege_error(database: Database) -> None:
    role = f"reader_{database.name}"
    database.execute(f"CREATE TABLE t (id int); CREATE ROLE {role} LOGIN")
    try:
        settings = database.server.settings(database.name, tcp=False, username=role)
        with (
            pytest.raises(PrivilegeError) as caught,
            table_lock(settings, [database.value("SELECT 't'::regclass::oid::bigint")]),
        ):
            pass
        assert "GRANT SELECT" in caught.value.hint
    finally:
        database.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize(
    ("master", "most", "limit"),
    [("local[2]", 4, None), ("local[2, 3]", 2, None), ("local", 1, None), ("local[8]", 4, 4), ("yarn", 4, 4)],
)
def test_no_more_tasks_than_connections_where_there_are_more_cores(master: str, most: int, limit: int | None) -> None:
    assert task_limit(master, most) == limit


@pytest.fixture
def closed_to_the_keyless(tmp_path: Path) -> Iterator[ConnectSettings]:
    """A table on a server that asks for a password and a client certificate, whose key lies in a file."""
    authority = trustme.CA()
    shown, ours = authority.issue_cert("localhost"), authority.issue_cert("reader@example.com")
    roots = authority.cert_pem.bytes().decode()
    tls = ServerTls(shown.cert_chain_pems[0].bytes().decode(), shown.private_key_pem.bytes().decode(), roots)
    key, certificate = tmp_path / "client.key", tmp_path / "client.crt"
    key.touch(0o600)
    ours.private_key_pem.write_to_path(key)
    ours.cert_chain_pems[0].write_to_path(certificate)
    client = TlsConfig(
        mode=TlsMode.VERIFY_FULL, trusted_root_certs=roots, client_cert=str(certificate), client_key=Secret(str(key))
    )
    hba = (TRUSTED_SOCKET, "hostssl all all 127.0.0.1/32 scram-sha-256 clientcert=verify-ca")
    with PostgresServer.start(tls=tls, hba=hba) as server:
        with server.connect() as connection:
            connection.execute("CREATE TABLE t (id int); INSERT INTO t SELECT generate_series(1, 20000)")
            connection.execute("CREATE PUBLICATION shop FOR TABLE t")
        yield server.settings(host="localhost", tls=client)


@pytest.mark.slow
def test_invariant_16_passwords_and_keys_show_nowhere_in_spark_and_a_failed_task_reads_again(
    closed_to_the_keyless: ConnectSettings, tmp_path: Path
) -> None:
    """In a process of its own: a session with UI, event log and task retries, which the shared one hasn't."""
    settings = closed_to_the_keyless
    assert settings.password is not None
    assert settings.tls.client_key is not None
    key = Path(settings.tls.client_key.reveal()).read_text().splitlines()
    script, kept = Path(__file__).with_name("copy_in_own_session.py"), tmp_path / "kept"
    kept.mkdir()
    command = [sys.executable, str(script), str(kept)]
    run = subprocess.run(command, input=pickle.dumps(settings), capture_output=True, timeout=240, check=False)
    said = (run.stdout + run.stderr).decode(errors="replace")
    assert run.returncode == 0, said[-3000:]
    shown = {path: path.read_text(errors="replace") for path in kept.rglob("*") if path.is_file()}
    assert any("read_copy_ranges" in text for path, text in shown.items() if "events" in path.parts)
    assert any("postgres_copy" in text for path, text in shown.items() if path.name.startswith("ui-"))
    for secret in (settings.password.reveal(), key[1], key[-2]):
        # As text, and as the list of numbers that a byte array is printed as.
        numbers = [str(byte) for byte in secret.encode()]
        for form in (secret, ", ".join(numbers), ",".join(numbers)):
            assert form not in said
            assert [path for path, text in shown.items() if form in text] == []
