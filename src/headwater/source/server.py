"""What the server says of itself: version, identity, limits, and how far its log is flushed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from headwater.errors import SourceError
from headwater.lsn import EndLsn
from headwater.source.session import Connection, fetch_one, translating


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
       CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END
"""


def server_facts(connection: Connection) -> ServerFacts:
    row = fetch_one(connection, _FACTS, doing="asking the server for its settings")
    assert row is not None
    version, database, database_oid, wal_level, slots, senders, sender_timeout, in_recovery, timeline = row
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
    )


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
    """Some providers keep pg_control_system() to themselves; a replication session may always ask IDENTIFY_SYSTEM."""
    parameters: dict[str, Any] = {**connection.info.get_parameters(), "password": connection.info.password or None}
    parameters |= {"replication": "database", "host": connection.info.host, "port": connection.info.port}
    with (
        translating("asking for the system identifier"),
        psycopg.connect(**parameters, autocommit=True) as replication,
    ):
        # psycopg's own methods speak the extended protocol, which a replication session refuses.
        result = replication.pgconn.exec_(b"IDENTIFY_SYSTEM")
        value = result.get_value(0, 0) if result.ntuples else None
    if value is None:
        raise SourceError(
            "the server did not tell its system identifier",
            detail="IDENTIFY_SYSTEM returned nothing",
            hint="Grant EXECUTE on pg_control_system() to the connection's role.",
        )
    return value.decode()


def flush_lsn(connection: Connection) -> EndLsn:
    """Up to where the log is durable; on a standby, up to where it is replayed.

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
