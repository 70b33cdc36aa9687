"""The two sessions a copy stands on: one that holds the lock, one that holds the exported snapshot (invariant 1).

The lock comes first and stays until the copy is durable. The engine takes its snapshot from the slot it makes; whoever
copies without a slot takes it here. Either session may die under us: then the copy starts again, it never goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import sql

from headwater.errors import ConnectionLost, PrivilegeError, Retry, SchemaError, SourceError
from headwater.schema.table import ReplicatedTableSchema, TableId, TableName, quote_identifier
from headwater.source.catalog import load_table_schemas
from headwater.source.copy_origin import CopyOrigin
from headwater.source.copy_plan import TARGET_RANGE_BYTES, CopiedTable, CopyPlan, plan_copy
from headwater.source.publication import published_tables
from headwater.source.server import system_identifier
from headwater.source.session import Connection, connect, fetch_all, fetch_one, translating
from headwater.wire.settings import ConnectSettings

_NAMES = """
SELECT c.oid, n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY(%s)
"""
_LOCKED = (
    "SELECT count(DISTINCT relation) FROM pg_locks WHERE pid = pg_backend_pid() AND granted AND relation = ANY(%s)"
)
_UNLOCKED_LEAVES = """
SELECT count(*) FROM pg_partition_tree(%s) t WHERE t.isleaf AND NOT EXISTS (
    SELECT FROM pg_locks l WHERE l.pid = pg_backend_pid() AND l.granted AND l.relation = t.relid)
"""
_IN_THE_WAY = """
SELECT DISTINCT ahead.pid
FROM pg_stat_activity ours CROSS JOIN LATERAL unnest(pg_blocking_pids(ours.pid)) AS ahead(pid)
WHERE ours.application_name = %(application_name)s AND ours.pid <> %(lock_pid)s
  AND %(lock_pid)s = ANY (pg_blocking_pids(ahead.pid))
"""
_LACKING = """
SELECT c.oid, has_schema_privilege(c.relnamespace, 'USAGE'), has_table_privilege(c.oid, 'SELECT') FROM pg_class c
WHERE c.oid = ANY(%s) AND NOT (has_schema_privilege(c.relnamespace, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'))
ORDER BY c.oid
"""
# Nothing else is in the way of our lock. A lock on a leaf is one on its root's rows.
_TAKEN = """
SELECT DISTINCT taken.relation::bigint
FROM pg_locks l
CROSS JOIN LATERAL (SELECT l.relation UNION SELECT relid FROM pg_partition_ancestors(l.relation)) AS taken(relation)
WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND taken.relation = ANY (%s::oid[])
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_ATTEMPTS = 5


class TablesTaken(SourceError):
    """Another session has some of the tables for itself, and a lock on several of them waits for nobody."""

    default_retry = Retry.TIMED


class TableLock:
    """ACCESS SHARE on tables and their leaves, in a session of its own. Belongs to one thread."""

    def __init__(self, connection: Connection, settings: ConnectSettings, table_ids: Sequence[TableId]) -> None:
        self.connection = connection
        """For planning under the lock. Whoever ends its transaction ends the lock."""
        self._settings = settings
        self.table_ids = list(table_ids)

    @property
    def backend_pid(self) -> int:
        return self.connection.info.backend_pid

    def check(self) -> None:
        """Raises ConnectionLost unless the locks are still held: what was copied until now may have holes."""
        try:
            row = self.connection.execute(_LOCKED, (self.table_ids,)).fetchone()
        except psycopg.Error as error:
            raise self._lost("the session that held it ended") from error
        if row is None or row[0] < len(set(self.table_ids)):
            raise self._lost("its transaction ended")

    def extend(self) -> None:
        """Lock leaves that were attached since, which a lock on the root does not prevent."""
        self._extend(self.table_ids)

    def _extend(self, table_ids: Sequence[TableId]) -> None:
        lock_tables(self.connection, table_ids)

    def plan(
        self,
        table: CopiedTable,
        schema: ReplicatedTableSchema,
        *,
        target_range_bytes: int = TARGET_RANGE_BYTES,
        parallelism: int = 1,
    ) -> CopyPlan:
        """Plan under the lock, which a leaf attached since it was taken is not under yet; ATTACH does not wait for us."""
        while True:
            self._extend([table.id])
            plan = plan_copy(
                self.connection, table, schema, target_range_bytes=target_range_bytes, parallelism=parallelism
            )
            row = fetch_one(self.connection, _UNLOCKED_LEAVES, (table.id,), doing="planning a copy")
            if row == (0,):
                return plan

    def _lost(self, why: str) -> ConnectionLost:
        return ConnectionLost(
            "the lock that protects a copy was lost",
            detail=f"On the server at {self._settings.address} {why}; a rewrite of the table may have passed the copy.",
            hint="The copy starts again. If this repeats, see the server's log for who ended the session.",
        )


def lock_tables(connection: Connection, table_ids: Sequence[TableId], *, wait: bool = True) -> None:
    """Take ACCESS SHARE, with leaves and inheritance children, in the connection's open transaction.

    Without `wait`, TablesTaken if it can't be had at once. Whoever wants several tables should ask so: a transaction that
    changes one of them and then another would deadlock with a lock that holds the second and waits for the first.
    """
    with translating("locking the tables to be copied"):
        _lock_tables(connection, sorted(set(table_ids)), wait)


def _lock_tables(connection: Connection, wanted: Sequence[TableId], wait: bool) -> None:
    for _ in range(_ATTEMPTS):
        names = _names(connection, wanted)
        missing = [id for id in wanted if id not in names]
        if missing:
            raise SchemaError(
                "a table to be copied does not exist",
                detail=f"No relation has the oid {', '.join(map(str, missing))}.",
                hint="It was dropped; it leaves the pipeline with the next look at the publication.",
            )
        listed = sql.SQL(", ").join(sql.Identifier(name.namespace, name.name) for name in names.values())
        connection.execute("SAVEPOINT before_lock")
        try:
            # One statement, in the order of the oids: two copies that start together can't wait for each other.
            mode = sql.SQL("" if wait else " NOWAIT")
            connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE{}").format(listed, mode))
        except psycopg.errors.UndefinedTable:
            connection.execute("ROLLBACK TO SAVEPOINT before_lock")
            continue
        except psycopg.errors.LockNotAvailable as error:
            raise TablesTaken(
                "a table to be copied is taken by another session",
                detail=_first_line(error),
                hint="Nothing is to be done: it is copied when the other session is through with it.",
            ) from error
        except psycopg.errors.InsufficientPrivilege as error:
            connection.execute("ROLLBACK TO SAVEPOINT before_lock")
            raise _may_not_read(connection, names, _first_line(error)) from error
        # The lock goes by name: one renamed, or dropped and made again, in between is another table now.
        if _names(connection, wanted) == names:
            connection.execute("RELEASE SAVEPOINT before_lock")
            return
        connection.execute("ROLLBACK TO SAVEPOINT before_lock")
    raise SourceError(
        "tables to be copied were renamed while they were being locked",
        detail=f"{_ATTEMPTS} attempts in a row met another name.",
        hint="Start the copy again when the renaming is over.",
    )


def _may_not_read(connection: Connection, names: Mapping[TableId, TableName], said: str) -> PrivilegeError:
    rows = fetch_all(connection, _LACKING, (list(names),), doing="looking at the role's rights")
    role = quote_identifier(connection.info.user)
    hidden = sorted({names[TableId(oid)].namespace for oid, usage, _ in rows if not usage})
    unreadable = [names[TableId(oid)].quoted for oid, _, select in rows if not select]
    grants = [f"GRANT USAGE ON SCHEMA {', '.join(map(quote_identifier, hidden))} TO {role};"] if hidden else []
    grants += [f"GRANT SELECT ON {', '.join(unreadable)} TO {role};"] if unreadable else []
    return PrivilegeError(
        f"role {role} may not read a table that is to be copied",
        detail=said,
        hint=f"Run {' '.join(grants)}" if grants else "The right was granted meanwhile: start the copy again.",
    )


def waits_for_each_other(connection: Connection, application_name: str, lock_pid: int) -> list[int]:
    """Who waits for the lock that `lock_pid` holds while a session of ours waits for them: nobody would ever go on.

    A statement that wants the table for itself queues behind our lock; a range that starts after it queues behind the
    statement, and so does the making of a slot, which waits for every transaction. Postgres sees no deadlock, since only
    we know that the sessions belong together.
    """
    parameters = {"application_name": application_name, "lock_pid": lock_pid}
    return [row[0] for row in fetch_all(connection, _IN_THE_WAY, parameters, doing="looking for waiting statements")]


def taken_tables(connection: Connection, table_ids: Sequence[TableId]) -> set[TableId]:
    """Those that another session has for itself, or waits to have."""
    rows = fetch_all(connection, _TAKEN, (list(table_ids),), doing="looking for locks in the way")
    return {TableId(oid) for (oid,) in rows}


@contextmanager
def table_lock(settings: ConnectSettings, table_ids: Sequence[TableId], *, wait: bool = True) -> Iterator[TableLock]:
    """Hold the tables from before the slot is made until the copy is durable.

    READ COMMITTED on purpose: the session keeps no snapshot between statements, so it holds back no vacuum, and it
    writes nothing, so no slot waits for it.
    """
    with _session(settings) as connection:
        with translating("locking the tables to be copied"):
            connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
        lock_tables(connection, table_ids, wait=wait)
        yield TableLock(connection, settings, table_ids)


@contextmanager
def export_snapshot(settings: ConnectSettings) -> Iterator[str]:
    """The name of a snapshot of this moment, made without a slot, and good until the context ends."""
    with _session(settings) as connection:
        with translating("exporting a snapshot"):
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = fetch_one(connection, "SELECT pg_export_snapshot()", doing="exporting a snapshot")
        assert row is not None
        yield str(row[0])


@dataclass(frozen=True, slots=True)
class SnapshotTable:
    schema: ReplicatedTableSchema
    plan: CopyPlan


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """Tables of a publication at one moment of one server, readable for as long as the context is open."""

    snapshot_name: str
    system_identifier: str
    settings: ConnectSettings
    tables: Mapping[str, SnapshotTable]
    lock: TableLock

    def options(self, table: str) -> dict[str, str]:
        """For `spark.read.format("postgres_copy").options(**...)`. Nothing secret: Spark shows options."""
        self._table(table)
        return {"exported_snapshot": self.snapshot_name, "table": table}

    def origin(self, table: str) -> CopyOrigin:
        found = self._table(table)
        return CopyOrigin(self.settings, self.snapshot_name, found.plan.server_started_at, found.schema.columns)

    def check(self) -> None:
        """Raises ConnectionLost if what was read until now may have holes. Ask once more when all is written."""
        self.lock.check()

    def _table(self, table: str) -> SnapshotTable:
        found = self.tables.get(table)
        if found is None:
            raise _not_published([table], self.tables)
        return found


@contextmanager
def exported_snapshot(
    settings: ConnectSettings,
    publication: str,
    tables: Sequence[str] | None = None,
    *,
    target_range_bytes: int = TARGET_RANGE_BYTES,
    parallelism: int = 1,
) -> Iterator[ExportedSnapshot]:
    """Read tables of a publication (all, or those named "namespace.table") at one moment, without a pipeline.

    Row filters and column lists of the publication hold. Keep the context open until what was read is written, and call
    `check()` then.
    """
    with _session(settings) as catalog:
        published = {str(table.name): table for table in published_tables(catalog, publication)}
        unknown = [name for name in tables or () if name not in published]
        if unknown:
            raise _not_published(unknown, published)
        wanted = {name: table for name, table in published.items() if tables is None or name in tables}
    ids = [table.id for table in wanted.values()]
    with table_lock(settings, ids) as lock, export_snapshot(settings) as snapshot_name:
        # Read under the lock: a column that was dropped before it is not planned for.
        schemas = load_table_schemas(lock.connection, ids, publication)
        planned = {
            name: SnapshotTable(
                schemas[table.id],
                lock.plan(table, schemas[table.id], target_range_bytes=target_range_bytes, parallelism=parallelism),
            )
            for name, table in wanted.items()
        }
        yield ExportedSnapshot(snapshot_name, system_identifier(lock.connection), settings, planned, lock)


def _not_published(names: Sequence[str], known: Collection[str]) -> SchemaError:
    return SchemaError(
        f"the publication has no table {', '.join(names)}",
        detail=f"It has {', '.join(sorted(known)) or 'none'}.",
        hint="Name tables as namespace.table, without quotes, as the publication has them.",
    )


@contextmanager
def _session(settings: ConnectSettings) -> Iterator[Connection]:
    connection = connect(settings)
    try:
        yield connection
    finally:
        connection.close()


def _names(connection: Connection, ids: Sequence[TableId]) -> dict[TableId, TableName]:
    rows = fetch_all(connection, _NAMES, (list(ids),), doing="looking up the tables to be copied")
    return {TableId(oid): TableName(namespace, name) for oid, namespace, name in sorted(rows)}


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0]
