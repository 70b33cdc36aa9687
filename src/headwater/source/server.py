"""Facts that the server reports: version, identity, limits, and how far its WAL is flushed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from headwater.errors import ConnectionLost, SourceError
from headwater.lsn import EndLsn
from headwater.source.session import Connection, fetch_one, shut_down_after, translating

_IDENTIFY_SECONDS = 30.0
_DEFAULT_LOCKS = 64 * 100
_OUR_PART = 4
"""A quarter: if the lock table is full, any session of the server may fail, with "out of shared memory"."""
_FEWEST_LOCKS = 8


@dataclass(frozen=True, slots=True)
class ServerFacts:
    version_number: int
    version: str
    system_identifier: str
    database: str
    database_oid: int
    wal_level: str
    max_replication_slots: int
    max_wal_senders: int
    wal_sender_timeout_ms: int
    in_recovery: bool
    timeline: int | None
    """None on a standby, whose timeline is its primary's to say."""
    lock_table_size: int = _DEFAULT_LOCKS
    """How many locks all sessions of the server may hold together (besides a few that each has to itself)."""

    def locks_for(self, holders: int) -> int:
        """How many relations each of our sessions that hold locks may lock at a time: together they leave most of the lock
        table to others."""
        return _part_of(self.lock_table_size, holders)

    @property
    def major(self) -> int:
        return self.version_number // 10000


_FACTS = """
SELECT current_setting('server_version'),
       current_database(),
       (SELECT oid::bigint FROM pg_database WHERE datname = current_database()),
       current_setting('wal_level'),
       current_setting('max_replication_slots')::int,
       current_setting('max_wal_senders')::int,
       -- pg_settings gives the bare number in the setting's unit, which is ms.
       (SELECT setting::int FROM pg_settings WHERE name = 'wal_sender_timeout'),
       pg_is_in_recovery(),
       CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END,
       {lock_table_size}
"""
_LOCK_TABLE_SIZE = """
current_setting('max_locks_per_transaction')::int
    * (current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int)
"""


def server_facts(connection: Connection) -> ServerFacts:
    row = fetch_one(
        connection, _FACTS.replace("{lock_table_size}", _LOCK_TABLE_SIZE), doing="asking the server for its settings"
    )
    assert row is not None
    version, database, database_oid, wal_level, slots, senders, sender_timeout, in_recovery, timeline, locks = row
    return ServerFacts(
        version_number=connection.info.server_version,
        version=version,
        system_identifier=system_identifier(connection),
        database=database,
        database_oid=database_oid,
        wal_level=wal_level,
        max_replication_slots=slots,
        max_wal_senders=senders,
        wal_sender_timeout_ms=sender_timeout,
        in_recovery=in_recovery,
        timeline=int(timeline, 16) if timeline is not None else None,
        lock_table_size=locks,
    )


def locks_for(connection: Connection, holders: int = 1) -> int:
    """As `ServerFacts.locks_for`, asked for by itself."""
    row = fetch_one(connection, f"SELECT {_LOCK_TABLE_SIZE}", doing="asking for the size of the lock table")
    assert row is not None
    return _part_of(row[0], holders)


def _part_of(lock_table_size: int, holders: int) -> int:
    return max(_FEWEST_LOCKS, lock_table_size // _OUR_PART // max(1, holders))


def system_identifier(connection: Connection) -> str:
    """The cluster's identity: the same for a primary and its standbys, another one after a new initdb."""
    allowed = fetch_one(
        connection,
        "SELECT has_function_privilege('pg_control_system()', 'EXECUTE')",
        doing="asking for the system identifier",
    )
    if allowed is not None and allowed[0]:
        row = fetch_one(
            connection, "SELECT system_identifier FROM pg_control_system()", doing="asking for the system identifier"
        )
        assert row is not None
        return str(row[0])
    return _identify_system(connection)


def _identify_system(connection: Connection) -> str:
    """Some providers do not grant pg_control_system(); a replication session may always run IDENTIFY_SYSTEM."""
    parameters: dict[str, Any] = {**connection.info.get_parameters(), "password": connection.info.password or None}
    parameters |= {"replication": "database", "host": connection.info.host, "port": connection.info.port}
    with (
        translating("asking for the system identifier"),
        psycopg.connect(**parameters, autocommit=True) as replication,
    ):
        # psycopg's own methods speak the extended protocol, which a replication session refuses. This one waits for ever.
        with shut_down_after(replication, _IDENTIFY_SECONDS) as late:
            result = replication.pgconn.exec_(b"IDENTIFY_SYSTEM")
        value = result.get_value(0, 0) if result.ntuples else None
    if late.is_set():
        raise ConnectionLost(
            "the server did not answer when it was asked for the system identifier",
            detail=f"IDENTIFY_SYSTEM got no answer for {_IDENTIFY_SECONDS:.0f} s",
            hint="Look for a proxy that holds connections open without forwarding. Headwater reconnects by itself.",
        )
    if value is None:
        raise SourceError(
            "the server did not return its system identifier",
            detail="IDENTIFY_SYSTEM returned nothing",
            hint="Grant EXECUTE on pg_control_system() to the connection's role.",
        )
    return value.decode()


def flush_lsn(connection: Connection) -> EndLsn:
    """The position up to which WAL is flushed; on a standby, up to which it is replayed.

    Not pg_current_wal_lsn(), which runs ahead of what is flushed and fails on a standby.
    """
    row = fetch_one(
        connection,
        "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END::text",
        doing="asking for the flush position",
    )
    if row is None or row[0] is None:
        raise SourceError(
            "the server has no flush position yet",
            detail="it is in recovery and has replayed nothing",
            hint="Wait until the standby follows its primary.",
        )
    return EndLsn.parse(row[0])
