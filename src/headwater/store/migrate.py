"""Numbered SQL files, applied once each, in order, however many processes start together.

Everything is in the namespace `headwater`. Each migration is one transaction under one advisory lock and is recorded
in `headwater.migrations` by component and number. Where all are recorded, nothing is written and no lock is taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from headwater.errors import StoreError
from headwater.source.lock import LOCK_CLASS
from headwater.source.session import Connection

# A number that is no pipeline's id.
_LOCK = (LOCK_CLASS, -1)
_FILE = re.compile(r"(\d{4})_(\w+)\.sql")

_BOOTSTRAP = """
CREATE TABLE IF NOT EXISTS headwater.migrations (
    component text NOT NULL,
    version integer NOT NULL,
    name text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (component, version)
)
"""

# Queries on the catalog, not to_regclass(): that one answers from a cache, and what another process made while we waited
# for the lock would not be there.
_NAMESPACE = "SELECT true FROM pg_namespace WHERE nspname = 'headwater'"
_RECORD = """
SELECT true FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'headwater' AND c.relname = 'migrations'
"""


# A role that owns the namespace or a table in it, or has put a trigger, a rule, a policy or a view there, can have its functions
# run by our sessions, with our rights. Read from the catalog alone; nothing in the namespace is touched.
_FOREIGN = """
WITH ours AS (SELECT oid FROM pg_namespace WHERE nspname = 'headwater'),
relations AS (SELECT c.* FROM pg_class c JOIN ours ON c.relnamespace = ours.oid),
owned(what, owner) AS (
    SELECT 'the namespace', n.nspowner FROM pg_namespace n JOIN ours ON ours.oid = n.oid
    UNION ALL SELECT 'relation ' || relname, relowner FROM relations
)
SELECT what || ' belongs to role ' || r.rolname FROM owned JOIN pg_roles r ON r.oid = owned.owner
WHERE NOT r.rolsuper AND r.rolname <> current_user
UNION ALL
SELECT 'trigger ' || t.tgname || ' on ' || relname FROM relations JOIN pg_trigger t ON t.tgrelid = relations.oid
WHERE NOT t.tgisinternal
UNION ALL
SELECT 'rule ' || w.rulename || ' on ' || relname FROM relations JOIN pg_rewrite w ON w.ev_class = relations.oid
UNION ALL
SELECT 'policy ' || p.polname || ' on ' || relname FROM relations JOIN pg_policy p ON p.polrelid = relations.oid
"""


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    statements: str


def read_migrations(directory: Traversable) -> list[Migration]:
    """The files NNNN_name.sql of a directory, in order; a gap or a number used twice is a defect of the package."""
    found = []
    for entry in directory.iterdir():
        match = _FILE.fullmatch(entry.name)
        if match is not None:
            found.append(Migration(int(match[1]), match[2], entry.read_text(encoding="utf-8")))
    found.sort(key=lambda migration: migration.version)
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise StoreError(
            "the migrations are not numbered without gaps",
            detail=", ".join(f"{migration.version:04}_{migration.name}" for migration in found) or "none found",
            hint="Install Headwater again; files of the package are missing.",
        )
    return found


def apply_migrations(connection: Connection, component: str, migrations: list[Migration]) -> int:
    """Bring the database up to date; how many were applied. The session must be in autocommit."""
    refuse_foreign(connection)
    applied = _applied(connection, component)
    _refuse_newer(component, applied, migrations)
    count = 0
    for migration in migrations:
        if migration.version in applied:
            continue
        with connection.transaction():
            hold_migrations(connection)
            if migration.version in _applied(connection, component):
                continue
            # IF NOT EXISTS alone asks for the right to create even where nothing is to be created.
            if not _exists(connection, _NAMESPACE):
                connection.execute("CREATE SCHEMA headwater")
            if not _exists(connection, _RECORD):
                connection.execute(_BOOTSTRAP)
            connection.execute(migration.statements.encode())
            connection.execute(
                "INSERT INTO headwater.migrations (component, version, name) VALUES (%s, %s, %s)",
                (component, migration.version, migration.name),
            )
            count += 1
    if count:
        # The namespace may have been made by another role between the look at it and our migrations.
        refuse_foreign(connection)
    return count


def hold_migrations(connection: Connection) -> None:
    """Keep other processes from migrating until the end of the transaction."""
    connection.execute("SELECT pg_advisory_xact_lock(%s::int, %s::int)", _LOCK)


def _exists(connection: Connection, query: str) -> bool:
    return connection.execute(query.encode()).fetchone() is not None


def _applied(connection: Connection, component: str) -> set[int]:
    if not _exists(connection, _RECORD):
        return set()
    rows = connection.execute("SELECT version FROM headwater.migrations WHERE component = %s", (component,))
    return {version for (version,) in rows}


def refuse_foreign(connection: Connection) -> None:
    """To be called before reading or writing in the namespace. StoreError unless we or a superuser made all of it."""
    found = [what for (what,) in connection.execute(_FOREIGN.encode())]
    if found:
        raise StoreError(
            "the namespace headwater contains objects of other roles, or that Headwater did not create",
            detail="; ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else ""),
            hint="Ask a superuser to check: the objects named there could run code with the rights of this role. Drop them, or "
            "give them to this role with ALTER ... OWNER TO; or set store_pg_connection to another database.",
        )


def _refuse_newer(component: str, applied: set[int], migrations: list[Migration]) -> None:
    newest = len(migrations)
    if applied and max(applied) > newest:
        raise StoreError(
            f"the namespace headwater was created by a newer version of Headwater ({component})",
            detail=f"it has migration {max(applied)}; this version has migrations up to {newest}",
            hint="Upgrade Headwater.",
        )
