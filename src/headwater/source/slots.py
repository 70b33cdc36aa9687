"""Replication slots: their names, what the server says of them, and how they are dropped.

A slot's name contains the pipeline's id, so a slot with one of these names is this pipeline's. Whether an existing slot can be
used is decided in `slot_check`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import psycopg

from headwater.lsn import EndLsn
from headwater.schema.table import TableId, quote_identifier
from headwater.source.session import Connection, fetch_all, fetch_one, translated
from headwater.source.slot_errors import CONFLICTING, slot_in_use
from headwater.wire.connection import WireConnection

PLUGIN = "pgoutput"
APPLICATION_PREFIX = "headwater"
_POLL_SECONDS = 0.1


def apply_slot_name(pipeline_id: int) -> str:
    return f"headwater_apply_{pipeline_id}"


def sync_slot_prefix(pipeline_id: int) -> str:
    """The prefix of all table sync slots of a pipeline, whichever run created them."""
    return f"headwater_sync_{pipeline_id}_"


def sync_slot_name(pipeline_id: int, table_id: TableId | None, run_token: str, attempt: int) -> str:
    """For one attempt at copying a table, or a group of tables (None). No other attempt, of this run or of another, has it:
    a slot that an earlier attempt still confirms or drops is never the slot of a later one.

    At most 55 bytes and the digits of the attempt with a 64 bit id; the server allows 63.
    """
    what = "group" if table_id is None else str(table_id)
    return f"{sync_slot_prefix(pipeline_id)}{what}_{run_token[:8]}_{attempt}"


@dataclass(frozen=True, slots=True)
class SlotFacts:
    name: str
    exists: bool
    plugin: str | None = None
    slot_type: str | None = None
    database: str | None = None
    temporary: bool = False
    active_pid: int | None = None
    wal_status: str | None = None
    invalidation_reason: str | None = None
    """As the server words it (17 and later); earlier servers show only wal_status, or that the slot conflicts."""
    confirmed_flush: EndLsn | None = None
    restart_lsn: EndLsn | None = None
    failover: bool = False
    synced: bool = False
    wal_keep_limit: str = ""
    """max_slot_wal_keep_size, as the server shows it."""

    @property
    def invalidated(self) -> bool:
        return self.exists and (self.wal_status == "lost" or self.invalidation_reason is not None)

    def lag_bytes(self, flush: EndLsn) -> int | None:
        """How far the confirmed position is behind the server's flush position."""
        return _distance(self.confirmed_flush, flush)

    def retained_bytes(self, flush: EndLsn) -> int | None:
        """How much WAL the slot keeps on the server's disk."""
        return _distance(self.restart_lsn, flush)


def _distance(start: EndLsn | None, end: EndLsn) -> int | None:
    return None if start is None else max(0, end.value - start.value)


# As one JSON value: columns came and went with the versions, and a missing one is then simply not there.
_SLOT = "SELECT to_jsonb(s), current_setting('max_slot_wal_keep_size') FROM pg_replication_slots s WHERE slot_name = %s"
_SLOTS = """
SELECT to_jsonb(s), current_setting('max_slot_wal_keep_size') FROM pg_replication_slots s
WHERE starts_with(slot_name::text, %s) AND database = current_database() ORDER BY slot_name
"""


def inspect_slot(connection: Connection, name: str) -> SlotFacts:
    row = fetch_one(connection, _SLOT, (name,), doing=f'looking at replication slot "{name}"')
    return SlotFacts(name, exists=False) if row is None else _facts(*row)


def sync_slots(connection: Connection, pipeline_id: int) -> list[SlotFacts]:
    """The table sync slots of a pipeline: what a crashed run left, or what is at work now."""
    prefix = sync_slot_prefix(pipeline_id)
    return [_facts(*row) for row in fetch_all(connection, _SLOTS, (prefix,), doing="listing table sync slots")]


def _facts(slot: dict[str, Any], wal_keep_limit: str) -> SlotFacts:
    reason = slot.get("invalidation_reason")
    if reason is None and slot.get("conflicting"):
        reason = CONFLICTING
    return SlotFacts(
        name=slot["slot_name"],
        exists=True,
        plugin=slot["plugin"],
        slot_type=slot["slot_type"],
        database=slot["database"],
        temporary=slot["temporary"],
        active_pid=slot["active_pid"],
        wal_status=slot["wal_status"],
        invalidation_reason=reason,
        confirmed_flush=_lsn(slot["confirmed_flush_lsn"]),
        restart_lsn=_lsn(slot["restart_lsn"]),
        failover=bool(slot.get("failover")),
        synced=bool(slot.get("synced")),
        wal_keep_limit=wal_keep_limit,
    )


def _lsn(text: str | None) -> EndLsn | None:
    return None if text is None else EndLsn.parse(text)


def create_slot(connection: WireConnection, name: str, *, failover: bool = False) -> EndLsn:
    """Create a pipeline's slot; returns where it begins. Waits for every open transaction."""
    options = " (FAILOVER)" if failover else ""
    command = f"CREATE_REPLICATION_SLOT {quote_identifier(name)} LOGICAL {PLUGIN}{options}"
    row = connection.query(command, waits=True)[0]
    return EndLsn.parse(row["consistent_point"] or "")


def make_failover(connection: WireConnection, name: str) -> None:
    """Have standbys synchronize a slot that exists. No session may read from it meanwhile."""
    connection.query(f"ALTER_REPLICATION_SLOT {quote_identifier(name)} (FAILOVER true)")


def drop_slot(connection: Connection, name: str, *, wait_seconds: float = 10.0) -> bool:
    """Drop the slot if it exists; returns whether it did. A walsender of ours that still holds it is ended.

    If another program's session holds it, waits a while, then SlotError. The session must be in autocommit: dropping a slot is
    no part of a transaction.
    """
    deadline = time.monotonic() + wait_seconds
    pause = threading.Event()
    while True:
        facts = inspect_slot(connection, name)
        if not facts.exists:
            return False
        if facts.active_pid is None:
            try:
                connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
                return True
            except psycopg.errors.UndefinedObject:
                return False
            except psycopg.errors.ObjectInUse:
                pass  # Taken again between our look and the drop.
            except psycopg.Error as error:
                raise translated(error, f'dropping replication slot "{name}"') from error
        elif _end_if_ours(connection, facts.active_pid, deadline):
            continue
        if time.monotonic() >= deadline:
            raise slot_in_use(name, facts.active_pid)
        # SQL has nothing to wait on for a slot's release.
        pause.wait(_POLL_SECONDS)


_ADVANCE = """
SELECT end_lsn::text FROM pg_replication_slot_advance(
    %s, CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END)
"""


def advance_slot(connection: Connection, name: str) -> EndLsn:
    """Advance past all that was committed until now, without reading it; returns where the slot is then."""
    row = fetch_one(connection, _ADVANCE, (name,), doing=f'advancing replication slot "{name}"')
    assert row is not None
    return EndLsn.parse(row[0])


def end_reader(connection: Connection, name: str, *, wait_seconds: float = 10.0) -> bool:
    """End the session that reads from the slot, if it is one of ours; whether it is gone.

    Call it only with the pipeline's lock held: a session of ours that still reads then belongs to a run that lost the lock.
    """
    facts = inspect_slot(connection, name)
    if facts.active_pid is None:
        return True
    return _end_if_ours(connection, facts.active_pid, time.monotonic() + wait_seconds)


def _end_if_ours(connection: Connection, pid: int, deadline: float) -> bool:
    """End the session and wait for it to be gone, if it is ours; whether it is gone."""
    wait_ms = max(1, round((deadline - time.monotonic()) * 1000))
    try:
        row = connection.execute(
            """SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity
               WHERE pid = %s AND starts_with(application_name, %s) AND pid <> pg_backend_pid()""",
            (wait_ms, pid, APPLICATION_PREFIX),
        ).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return False
    except psycopg.Error as error:
        raise translated(error, "ending an old replication session") from error
    return row is not None and bool(row[0])
