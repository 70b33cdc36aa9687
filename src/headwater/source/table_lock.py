"""The lock that a copy needs: ACCESS SHARE on its tables, from before its slot is created until it is durable (invariant 1).

All sessions of a server share one lock table, and a statement that finds it full fails. So the locks of one copy are bounded: of
tables with more partitions than that only the partitioned tables themselves are locked. That keeps their columns and their
partitions as they are. A partition that is rewritten meanwhile is found: its storage, as it was when the lock was taken and so
before the snapshot, must be the one that is planned and the one that is read (`same_relation`). Else the copy starts again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import sql

from headwater.errors import ConnectionLost, PrivilegeError, Retry, SchemaError, SourceError
from headwater.schema.table import ReplicatedTableSchema, TableId, TableName, quote_identifier
from headwater.source.copy_plan import TARGET_RANGE_BYTES, CopiedTable, CopyPlan, plan_copy
from headwater.source.partitions import PARTITION_TREE, relation_storages
from headwater.source.same_relation import moved
from headwater.source.session import Connection, connect, fetch_all, fetch_one, translating
from headwater.wire.settings import ConnectSettings

_RELATIONS = (
    PARTITION_TREE
    + """
SELECT t.top::bigint, t.oid::bigint, t.relkind::text, n.nspname::text, c.relname::text
FROM tree t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
"""
)
_LOCKED = (
    "SELECT count(DISTINCT relation) FROM pg_locks WHERE pid = pg_backend_pid() AND granted AND relation = ANY(%s)"
)
_UNLOCKED_LEAVES = (
    PARTITION_TREE
    + """
SELECT count(*) FROM tree t WHERE t.relkind <> 'p' AND NOT EXISTS (
    SELECT FROM pg_locks l WHERE l.pid = pg_backend_pid() AND l.granted AND l.relation = t.oid)
"""
)
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
    """Another session has an ACCESS EXCLUSIVE lock on some of the tables; locks on several tables are taken without waiting."""

    default_retry = Retry.TIMED


class TableLock:
    """ACCESS SHARE on tables, in a session of its own. Belongs to one thread."""

    def __init__(
        self,
        connection: Connection,
        settings: ConnectSettings,
        table_ids: Sequence[TableId],
        storages: Mapping[int, int | None] | None = None,
    ) -> None:
        """`storages` of the partitions that are not locked, by their oids; None where all are."""
        self.connection = connection
        """For planning under the lock. To end its transaction ends the lock."""
        self._settings = settings
        self._storages = storages
        self.table_ids = list(table_ids)

    @property
    def backend_pid(self) -> int:
        return self.connection.info.backend_pid

    def check(self) -> None:
        """Raises ConnectionLost unless the locks are still held: rows may be missing from what was copied until now."""
        try:
            row = self.connection.execute(_LOCKED, (self.table_ids,)).fetchone()
        except psycopg.Error as error:
            raise self._lost("the session that held it ended") from error
        if row is None or row[0] < len(set(self.table_ids)):
            raise self._lost("its transaction ended")

    def plan(
        self,
        table: CopiedTable,
        schema: ReplicatedTableSchema,
        *,
        target_range_bytes: int = TARGET_RANGE_BYTES,
        parallelism: int = 1,
    ) -> CopyPlan:
        """Plan under the lock. A leaf that was attached since it was taken is not locked yet; ATTACH does not wait for us."""
        while True:
            if self._storages is None:
                lock_tables(self.connection, [table.id])
            plan = plan_copy(
                self.connection,
                table,
                schema,
                target_range_bytes=target_range_bytes,
                parallelism=parallelism,
                leaves_are_locked=self._storages is None,
            )
            if self._storages is not None:
                self._check_storages(plan, self._storages)
                return plan
            if self._has_all_leaves(table.id):
                return plan

    @staticmethod
    def _check_storages(plan: CopyPlan, storages: Mapping[int, int | None]) -> None:
        """What was rewritten between the lock and the plan may look empty at the snapshot, whose rows are in the old storage."""
        for planned in plan.ranges:
            if storages.get(planned.oid) != planned.storage:
                raise moved(planned.relation, "it was attached, truncated or rewritten while its copy was prepared")

    def _has_all_leaves(self, table_id: TableId) -> bool:
        return fetch_one(self.connection, _UNLOCKED_LEAVES, {"tops": [table_id]}, doing="planning a copy") == (0,)

    def _lost(self, why: str) -> ConnectionLost:
        return ConnectionLost(
            "the lock that protects a copy was lost",
            detail=f"On the server at {self._settings.address} {why}; the table may have been rewritten during the copy.",
            hint="The copy starts again. If this repeats, look in the server's log for what ended the session.",
        )


@contextmanager
def table_lock(
    settings: ConnectSettings, table_ids: Sequence[TableId], *, wait: bool = True, most_relations: int | None = None
) -> Iterator[TableLock]:
    """Hold the lock from before the slot is created until the copy is durable. For the rest see `lock_tables`.

    READ COMMITTED on purpose: the session keeps no snapshot between statements, so it holds back no vacuum, and it
    writes nothing, so no slot waits for it.
    """
    with closing(connect(settings)) as connection:
        with translating("locking the tables to be copied"):
            connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
        with_leaves = lock_tables(connection, table_ids, wait=wait, most_relations=most_relations)
        yield TableLock(
            connection, settings, table_ids, None if with_leaves else relation_storages(connection, table_ids)
        )


def lock_tables(
    connection: Connection, table_ids: Sequence[TableId], *, wait: bool = True, most_relations: int | None = None
) -> bool:
    """Take ACCESS SHARE in the connection's open transaction. Whether partitions are locked too: not if there are more
    relations than `most_relations`.

    Without `wait`, TablesTaken if the lock cannot be had at once. Locks on several tables should be asked for so: a transaction
    that changes one of them and then another would deadlock with a lock that holds the second and waits for the first.
    """
    most = sys.maxsize if most_relations is None else most_relations
    with translating("locking the tables to be copied"):
        return _lock_tables(connection, sorted(set(table_ids)), wait, most)


def _lock_tables(connection: Connection, wanted: Sequence[TableId], wait: bool, most: int) -> bool:
    for _ in range(_ATTEMPTS):
        found = _to_lock(connection, wanted, most)
        missing = [id for id in wanted if id not in found.names]
        if missing:
            raise SchemaError(
                "a table to be copied does not exist",
                detail=f"No relation has the oid {', '.join(map(str, missing))}.",
                hint="It was dropped; the pipeline removes it when it reads the publication the next time.",
            )
        connection.execute("SAVEPOINT before_lock")
        try:
            # One statement, in the order of the oids: two copies that start together can't wait for each other.
            mode = sql.SQL("" if wait else " NOWAIT")
            connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE{}").format(found.listed, mode))
        except psycopg.errors.UndefinedTable:
            connection.execute("ROLLBACK TO SAVEPOINT before_lock")
            continue
        except psycopg.errors.LockNotAvailable as error:
            raise TablesTaken(
                "a table to be copied is locked by another session",
                detail=_first_line(error),
                hint="No action is needed: it is copied when the other session has released its lock.",
            ) from error
        except psycopg.errors.InsufficientPrivilege as error:
            connection.execute("ROLLBACK TO SAVEPOINT before_lock")
            raise _may_not_read(connection, found.names, _first_line(error)) from error
        # The lock goes by name: one renamed, or dropped and made again, in between is another table now.
        if _to_lock(connection, wanted, most) == found:
            connection.execute("RELEASE SAVEPOINT before_lock")
            return found.with_leaves
        connection.execute("ROLLBACK TO SAVEPOINT before_lock")
    raise SourceError(
        "tables to be copied were renamed while they were being locked",
        detail=f"{_ATTEMPTS} attempts in a row found another name.",
        hint="Start the copy again when the tables are no longer being renamed.",
    )


@dataclass(frozen=True, slots=True)
class _ToLock:
    names: Mapping[TableId, TableName]
    """In the order of the oids."""
    whole: frozenset[TableId]
    """Those whose partitions are locked with them."""
    with_leaves: bool

    @property
    def listed(self) -> sql.Composable:
        return sql.SQL(", ").join(
            # Rows of tables that inherit from a plain one are not its own.
            sql.SQL("{}{}").format(
                sql.SQL("" if id in self.whole else "ONLY "), sql.Identifier(name.namespace, name.name)
            )
            for id, name in self.names.items()
        )


def _to_lock(connection: Connection, wanted: Sequence[TableId], most: int) -> _ToLock:
    rows = fetch_all(connection, _RELATIONS, {"tops": list(wanted)}, doing="looking up the tables to be copied")
    tops = {TableId(oid): TableName(namespace, name) for top, oid, _, namespace, name in sorted(rows) if top == oid}
    if len(rows) <= most:
        whole = frozenset(TableId(oid) for top, oid, kind, *_ in rows if top == oid and kind == "p")
        return _ToLock(tops, whole, with_leaves=True)
    roots = {TableId(oid): TableName(namespace, name) for _, oid, kind, namespace, name in rows if kind == "p"}
    # More levels than that: then what is between the root and its leaves is found like what happens to leaves.
    names = roots | tops if len(roots | tops) <= most else tops
    return _ToLock(dict(sorted(names.items())), frozenset(), with_leaves=False)


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
    """Who waits for the lock that `lock_pid` holds while a session of ours waits for them: both would wait for ever.

    A statement that needs an ACCESS EXCLUSIVE lock queues behind our lock; a range that starts after it queues behind the
    statement, and so does the creation of a slot, which waits for every transaction. Postgres sees no deadlock, since only
    we know that the sessions belong together.
    """
    parameters = {"application_name": application_name, "lock_pid": lock_pid}
    return [row[0] for row in fetch_all(connection, _IN_THE_WAY, parameters, doing="looking for waiting statements")]


def taken_tables(connection: Connection, table_ids: Sequence[TableId]) -> set[TableId]:
    """Those on which another session has, or waits for, an ACCESS EXCLUSIVE lock."""
    rows = fetch_all(connection, _TAKEN, (list(table_ids),), doing="looking for locks in the way")
    return {TableId(oid) for (oid,) in rows}


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0]
