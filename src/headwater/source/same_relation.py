"""Does a name still lead to the relation that was planned? Statements name relations, and names can change meanwhile.

ALTER SCHEMA ... RENAME takes no lock on the tables in it, so a lock on a table does not hold its name: the next statement may
read a view, which runs its owner's functions as our role, or a table with other rows. Three things together exclude that:

- sessions expand no view (`restrict_nonsystem_relation_kind`, see wire.startup);
- before a read the name must lead to the planned oid and the planned storage;
- after it, and before anything that was read is used, the transaction's own locks say what was read: a lock stays until the
  transaction ends, whatever happened to the name since. A name that was moved for the moment of the read alone shows here.
"""

from __future__ import annotations

from collections.abc import Mapping

from headwater.errors import StartAgain
from headwater.schema.table import TableName
from headwater.wire.commands import literal

FIRST_USER_OID = 16384

# Functions and not tables of the catalog: a query would see it as of the transaction's snapshot, these as it is now.
_NAMED = """pg_catalog.to_regclass({name})::oid::bigint = {oid} AS is_there,
    pg_catalog.pg_relation_filenode({oid}::oid)::bigint AS storage"""
# Nothing but the relation, its indexes, and what is above or below it in its partition tree.
_LOCKED = """(SELECT coalesce(bool_or(l.relation = {oid}::oid), false) AND coalesce(bool_and(
        l.relation = {oid}::oid OR pg_catalog.pg_index_has_property(l.relation, 'clusterable') IS NOT NULL
        OR EXISTS (SELECT FROM pg_catalog.pg_partition_ancestors({oid}::oid) up WHERE up.relid = l.relation)
        OR EXISTS (SELECT FROM pg_catalog.pg_partition_ancestors(l.relation) up WHERE up.relid = {oid}::oid)), false)
    FROM pg_catalog.pg_locks l
    WHERE l.pid = pg_catalog.pg_backend_pid() AND l.locktype = 'relation' AND l.granted AND l.relation >= {first}::oid
    ) AS was_read"""


def before_reading(name: TableName, oid: int) -> str:
    """A query: `is_there`, `storage`."""
    return "SELECT " + _NAMED.format(name=literal(name.quoted), oid=int(oid))


def after_reading(name: TableName, oid: int) -> str:
    """A query in the transaction that has read: `is_there`, `storage`, `was_read`."""
    locked = _LOCKED.format(oid=int(oid), first=FIRST_USER_OID)
    return f"{before_reading(name, oid)}, {locked}"


def require_same(name: TableName, storage: int | None, found: Mapping[str, object]) -> None:
    """Raises StartAgain unless the answer says that it is the planned relation, with the planned storage if that matters."""
    if not _is_true(found["is_there"]) or not _is_true(found.get("was_read", True)):
        raise moved(name, "its name leads to another relation now, or did while it was read")
    is_now = found["storage"]
    if storage is not None and (is_now is None or int(str(is_now)) != storage):
        raise moved(name, "its storage was replaced meanwhile, by TRUNCATE, VACUUM FULL or ALTER TABLE")


def moved(name: TableName, detail: str) -> StartAgain:
    return StartAgain(
        f"{name} is no longer the table that was planned to be read",
        detail=detail,
        hint="No action is needed: its copy starts again. If this repeats, find out who renames schemas or rewrites tables.",
    )


def _is_true(value: object) -> bool:
    """As psycopg gives it, or as text."""
    return value is True or value == "t"
