"""Checks of what slots need: failover slots that no standby synchronizes, a standby that cannot decode, and a heartbeat that
cannot be sent."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.source.finding import Finding, error, warning
from headwater.source.server import ServerFacts
from headwater.source.session import Connection, fetch_all, fetch_one

FAILOVER_SINCE = 17
STANDBY_SINCE = 16


def standby_findings(connection: Connection, server: ServerFacts, store_in_source: bool) -> Iterator[Finding]:
    if not server.in_recovery:
        return
    if server.major < STANDBY_SINCE:
        yield error(
            "the server is a standby",
            f"version {server.version} cannot decode changes on a standby; that needs {STANDBY_SINCE}",
            "Point pg_connection at the primary.",
        )
        return
    if store_in_source:
        yield error(
            "the server is a standby, and the store would be in it",
            "a standby takes no writes",
            "Set store_pg_connection to a database that can be written.",
        )
    row = fetch_one(
        connection,
        "SELECT current_setting('hot_standby_feedback')::bool, current_setting('primary_slot_name')",
        doing="looking at the standby's settings",
    )
    assert row is not None
    missing = [name for name, there in (("hot_standby_feedback", row[0]), ("primary_slot_name", row[1])) if not there]
    if missing:
        yield warning(
            "the primary may remove catalog rows that the slot on this standby needs",
            f"not set on the standby: {' and '.join(missing)}; a vacuum of the primary's catalog then invalidates the slot",
            "Set hot_standby_feedback = on and primary_slot_name to a physical slot of the primary.",
        )


# A standby's own settings cannot be seen from its primary; their effect can. Feedback shows as the slot's xmin.
_STANDBYS = """
SELECT count(*), count(*) FILTER (WHERE active), count(*) FILTER (WHERE active AND xmin IS NULL)
FROM pg_replication_slots WHERE slot_type = 'physical'
"""
_SYNCHRONIZED = """
SELECT trim(name), coalesce(s.active, false)
FROM unnest(string_to_array(current_setting('synchronized_standby_slots'), ',')) AS listed(name)
LEFT JOIN pg_replication_slots s ON s.slot_name = trim(name) AND s.slot_type = 'physical'
"""
_ON_STANDBY = "sync_replication_slots = on, hot_standby_feedback = on and primary_slot_name"


def failover_findings(connection: Connection, server: ServerFacts) -> Iterator[Finding]:
    """For a pipeline that asks for a failover slot."""
    if server.major < FAILOVER_SINCE:
        yield error(
            "the server has no failover slots",
            f"failover_slot is set; version {server.version} has no failover slots, version {FAILOVER_SINCE} and later have",
            "Upgrade the server, or set failover_slot = false.",
        )
        return
    if server.in_recovery:
        yield error(
            "a slot on a standby cannot be a failover slot",
            "failover_slot is set, and pg_connection names a standby",
            "Point pg_connection at the primary, or set failover_slot = false.",
        )
        return
    row = fetch_one(connection, _STANDBYS, doing="looking for standbys")
    assert row is not None
    slots, active, without_feedback = row
    if active == 0:
        yield warning(
            "no standby can synchronize the slot",
            "no physical slot is in use" if slots else "the server has no physical slot for a standby",
            f"On the standby set {_ON_STANDBY} to a physical slot of this server.",
        )
    elif without_feedback:
        yield warning(
            f"{without_feedback} of {active} standbys cannot synchronize the slot",
            "a physical slot without an xmin: hot_standby_feedback is off",
            f"On the standby set {_ON_STANDBY}.",
        )
    yield from _synchronized(fetch_all(connection, _SYNCHRONIZED, doing="looking at synchronized_standby_slots"))


def _synchronized(listed: list[tuple[str, bool]]) -> Iterator[Finding]:
    if not listed:
        yield warning(
            "the lake may get ahead of a standby",
            "synchronized_standby_slots is empty; after the promotion of a standby that lagged, all tables are copied again",
            "Set synchronized_standby_slots on this server to the physical slots of its standbys.",
        )
    inactive = [name for name, active in listed if not active]
    if inactive:
        yield warning(
            "the server sends no changes before an unreachable standby has confirmed them",
            f"synchronized_standby_slots names {', '.join(inactive)}, which no standby uses at the moment",
            "Start that standby, or remove its slot from synchronized_standby_slots.",
        )


# By name: the function has another parameter from 17 on.
_MESSAGES = """
SELECT bool_and(has_function_privilege(oid, 'EXECUTE')), current_user::text FROM pg_proc
WHERE proname = 'pg_logical_emit_message' AND pronamespace = 'pg_catalog'::regnamespace AND proargtypes[2] = 'text'::regtype
"""


def heartbeat_findings(connection: Connection, server: ServerFacts) -> Iterator[Finding]:
    """For a pipeline that asks for a heartbeat."""
    if server.in_recovery:
        yield warning(
            "no heartbeat is sent",
            "heartbeat_interval_ms is set, and pg_connection names a standby, which takes no writes",
            "Remove heartbeat_interval_ms, or have something write on the primary now and then.",
        )
        return
    row = fetch_one(connection, _MESSAGES, doing="looking at the right to send a heartbeat")
    if row is not None and not row[0]:
        yield error(
            f'role "{row[1]}" may not send a heartbeat',
            "heartbeat_interval_ms is set, and the role lacks EXECUTE on pg_logical_emit_message",
            f'Run GRANT EXECUTE ON FUNCTION pg_logical_emit_message TO "{row[1]}";, or remove heartbeat_interval_ms.',
        )
