"""Removes a pipeline's state, and the namespace `headwater` with that of the last pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from headwater.source.session import Connection
from headwater.store.migrate import hold_migrations, refuse_foreign

_TABLES = (
    "table_states",
    "table_schemas",
    "destination_tables",
    "replication_progress",
    "lineages",
    "runs",
    "table_fingerprints",
)
_PRESENT = """
SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'headwater' AND c.relname = ANY (%s) ORDER BY 1
"""
_THERE = """
SELECT true FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'headwater' AND c.relname = 'table_states'
"""


def is_there(connection: Connection) -> bool:
    """Whether a store was ever started here. Makes nothing. StoreError if what is there could run another role's functions."""
    refuse_foreign(connection)
    return connection.execute(_THERE).fetchone() is not None


@dataclass(frozen=True, slots=True)
class Removed:
    rows: int
    """How much was recorded for the pipeline; none for a pipeline of which nothing was recorded."""
    was_last: bool = False
    """Whether no other pipeline was left, so that the tables and the namespace went too."""


def remove_pipeline(connection: Connection, pipeline_id: int) -> Removed:
    """Delete all that is recorded for the pipeline. May be sent twice. The session must be in autocommit."""
    with connection.transaction():
        hold_migrations(connection)
        if not is_there(connection):
            return Removed(0)
        # An older version may have made the store, with fewer tables.
        tables = [name for (name,) in connection.execute(_PRESENT, (list(_TABLES),))]
        # No other session can record between our look for other pipelines and the drop.
        connection.execute(f"LOCK TABLE {', '.join(f'headwater.{name}' for name in tables)} IN EXCLUSIVE MODE".encode())
        rows, left = 0, False
        for name in tables:
            deleted = connection.execute(
                f"DELETE FROM headwater.{name} WHERE pipeline_id = %s".encode(), (pipeline_id,)
            )
            rows += deleted.rowcount
            left = (
                left or connection.execute(f"SELECT true FROM headwater.{name} LIMIT 1".encode()).fetchone() is not None
            )
        return Removed(rows, was_last=not left and _drop_tables(connection, tables))


def _drop_tables(connection: Connection, tables: list[str]) -> bool:
    """Drop the tables of the store, and the namespace if it is empty then. Objects of others stay, with the namespace."""
    try:
        with connection.transaction():
            connection.execute(f"DROP TABLE {', '.join(f'headwater.{name}' for name in tables)}".encode())
            connection.execute("DELETE FROM headwater.migrations WHERE component = 'store'")
            if connection.execute("SELECT true FROM headwater.migrations LIMIT 1").fetchone() is None:
                connection.execute("DROP TABLE headwater.migrations")
        with connection.transaction():
            connection.execute("DROP SCHEMA headwater")
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.DependentObjectsStillExist):
        # Another role created them, or the namespace holds other objects: no rows of ours are left, which is what matters.
        return False
    return True
