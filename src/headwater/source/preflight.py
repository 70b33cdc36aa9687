"""Is the source ready for this pipeline? Finds everything that would fail later, and reports it all at once.

Reads only. An error stops the start; a warning is only shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headwater.config.pipeline import PipelineConfig
from headwater.errors import PreflightError, SourceError
from headwater.schema.table import TableId, quote_identifier
from headwater.source.finding import Finding as Finding
from headwater.source.finding import Severity as Severity
from headwater.source.finding import error, warning
from headwater.source.preflight_slots import failover_findings, heartbeat_findings, standby_findings
from headwater.source.preflight_tables import TableFacts, table_facts
from headwater.source.publication import (
    OWN_NAMESPACE,
    PublicationOptions,
    PublishedTable,
    publication_options,
    published_tables,
)
from headwater.source.server import ServerFacts, server_facts
from headwater.source.session import Connection, fetch_one
from headwater.source.slots import apply_slot_name, sync_slot_prefix

OLDEST_VERSION = 140000
_SHORTEST_SENDER_TIMEOUT_MS = 5000
_NAMES_SHOWN = 10


def run_preflight(
    connection: Connection,
    publication: str,
    *,
    pipeline_id: int,
    max_table_sync_workers: int = 4,
    store_in_source: bool = True,
    failover_slot: bool = False,
    heartbeat: bool = False,
) -> list[Finding]:
    """Every finding, errors first. Raises only if the server cannot be asked at all."""
    server = server_facts(connection)
    findings = [*_server(server), *standby_findings(connection, server, store_in_source)]
    if failover_slot:
        findings += failover_findings(connection, server)
    if heartbeat:
        findings += heartbeat_findings(connection, server)
    findings += _role(connection)
    findings += _capacity(connection, server, pipeline_id, 1 + max_table_sync_workers)
    if store_in_source:
        findings += _own_namespace(connection, server)
    findings += _publication(connection, publication, server.locks_for(max_table_sync_workers))
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


def check_source(connection: Connection, config: PipelineConfig, *, store_in_source: bool) -> list[Finding]:
    """The preflight of a pipeline: raises PreflightError, or returns the warnings."""
    findings = run_preflight(
        connection,
        config.publication_name,
        pipeline_id=config.id,
        max_table_sync_workers=config.max_table_sync_workers,
        store_in_source=store_in_source,
        failover_slot=config.failover_slot,
        heartbeat=config.heartbeat_interval_ms is not None,
    )
    raise_for_errors(findings)
    return findings


def raise_for_errors(findings: Sequence[Finding]) -> None:
    """PreflightError with all findings, warnings too, if at least one is an error."""
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
        raise PreflightError(
            f"the source is not ready: {count}",
            detail="\n".join(str(finding) for finding in findings),
            hint=errors[0].hint if len(errors) == 1 else "Resolve each finding above, then start again.",
        )


def _server(server: ServerFacts) -> Iterator[Finding]:
    if server.version_number < OLDEST_VERSION:
        yield error(
            f"the server's version {server.version} is too old",
            "logical replication in the binary format needs Postgres 14 or newer",
            "Upgrade the server.",
        )
    if server.wal_level != "logical":
        yield error(
            "the server's WAL does not contain what logical replication needs",
            f'wal_level is "{server.wal_level}", expected "logical"',
            "Run ALTER SYSTEM SET wal_level = 'logical'; and restart the server.",
        )
    timeout = server.wal_sender_timeout_ms
    if timeout == 0:
        yield warning(
            "the server never ends the walsender of an unreachable client",
            "wal_sender_timeout is 0, so the slot of a client that is gone stays in use",
            "Set wal_sender_timeout to 60s.",
        )
    elif timeout < _SHORTEST_SENDER_TIMEOUT_MS:
        yield warning(
            "the server ends walsenders after a very short silence of the client",
            f"wal_sender_timeout is {timeout} ms; a short pause of this machine may end the stream",
            "Set wal_sender_timeout to 60s.",
        )


_ROLE = """
SELECT current_user::text, rolreplication OR rolsuper OR EXISTS (
    -- Providers that do not grant the attribute offer a role instead.
    SELECT FROM pg_roles provider WHERE provider.rolname IN ('rds_replication', 'rds_superuser')
    AND pg_has_role(current_user, provider.oid, 'MEMBER'))
FROM pg_roles WHERE rolname = current_user
"""


def _role(connection: Connection) -> Iterator[Finding]:
    row = fetch_one(connection, _ROLE, doing="looking at the role's rights")
    if row is not None and not row[1]:
        yield error(
            f'role "{row[0]}" may not replicate',
            "it lacks the attribute REPLICATION",
            f"Run ALTER ROLE {quote_identifier(row[0])} REPLICATION; "
            f"(on RDS: GRANT rds_replication TO {quote_identifier(row[0])};).",
        )


_USED = """
SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name <> %s AND NOT starts_with(slot_name::text, %s)),
       (SELECT count(*) FROM pg_stat_replication
        WHERE pid NOT IN (SELECT active_pid FROM pg_replication_slots WHERE active_pid IS NOT NULL
                          AND (slot_name = %s OR starts_with(slot_name::text, %s))))
"""


def _capacity(connection: Connection, server: ServerFacts, pipeline_id: int, needed: int) -> Iterator[Finding]:
    """Slots of an earlier run of this pipeline count as free: they are taken over or dropped."""
    own = (apply_slot_name(pipeline_id), sync_slot_prefix(pipeline_id))
    # On a standby one more session asks for the timeline.
    senders = needed + 1 if server.in_recovery else needed
    row = fetch_one(connection, _USED, (*own, *own), doing="counting replication slots")
    assert row is not None
    limits = (
        ("replication slots", "max_replication_slots", server.max_replication_slots, row[0], needed),
        ("wal senders", "max_wal_senders", server.max_wal_senders, row[1], senders),
    )
    for what, setting, limit, used, needed in limits:
        if limit - used < needed:
            yield error(
                f"the server has too few free {what}",
                f"{setting} is {limit}, others use {used}, this pipeline needs {needed}",
                f"Raise {setting} to at least {used + needed} and restart the server, or lower max_table_sync_workers.",
            )


_NAMESPACE = """
SELECT current_user::text, current_database()::text,
       (SELECT has_schema_privilege(oid, 'CREATE') AND has_schema_privilege(oid, 'USAGE')
        FROM pg_namespace WHERE nspname = %s),
       has_database_privilege(current_database(), 'CREATE')
"""


def _own_namespace(connection: Connection, server: ServerFacts) -> Iterator[Finding]:
    if server.in_recovery:
        return
    row = fetch_one(connection, _NAMESPACE, (OWN_NAMESPACE,), doing="looking at the rights on our namespace")
    assert row is not None
    role, database, in_namespace, in_database = row
    elsewhere = "or set store_pg_connection to a database it may write to"
    if in_namespace is None and not in_database:
        yield error(
            f'role "{role}" cannot create the namespace {OWN_NAMESPACE}, where progress is kept',
            f'it lacks CREATE on database "{database}"',
            f"Run GRANT CREATE ON DATABASE {quote_identifier(database)} TO {quote_identifier(role)};, {elsewhere}.",
        )
    elif in_namespace is False:
        yield error(
            f'role "{role}" may not write to the namespace {OWN_NAMESPACE}, where progress is kept',
            "it lacks USAGE or CREATE on it",
            f"Run GRANT USAGE, CREATE ON SCHEMA {OWN_NAMESPACE} TO {quote_identifier(role)};, {elsewhere}.",
        )


def _publication(connection: Connection, name: str, locks: int) -> Iterator[Finding]:
    try:
        publication = publication_options(connection, name)
        tables = published_tables(connection, name)
    except SourceError as trouble:
        yield error(trouble.message, trouble.detail, trouble.hint)
        return
    if not tables:
        yield error(
            f'publication "{name}" publishes no table',
            f"it contains no tables, or only system tables and those of the namespace {OWN_NAMESPACE}",
            f"Run ALTER PUBLICATION {quote_identifier(name)} ADD TABLE ...;.",
        )
        return
    if publication.missing_operations:
        missing = ", ".join(publication.missing_operations)
        yield warning(
            f'publication "{name}" does not publish every operation',
            f"missing: {missing}; what the source changes that way is not changed in the lake",
            f"If this is not intended, run ALTER PUBLICATION {quote_identifier(name)} "
            "SET (publish = 'insert, update, delete, truncate');.",
        )
    facts = table_facts(connection, name, [TableId(table.id) for table in tables])
    yield from _rights(connection, facts)
    yield from _identities(publication, facts)
    yield from _left_out(connection, publication, facts)
    yield from _locks(tables, locks)


def _rights(connection: Connection, facts: Sequence[TableFacts]) -> Iterator[Finding]:
    role = connection.info.user
    hidden = sorted({fact.name.namespace for fact in facts if not fact.namespace_usage})
    if hidden:
        yield error(
            f'role "{role}" may not use {_count(hidden, "namespace")}',
            f"no USAGE on {_listed(hidden)}",
            f"Run GRANT USAGE ON SCHEMA {quote_identifier(hidden[0])} TO {quote_identifier(role)}; for each of them.",
        )
    unreadable = [fact.name.quoted for fact in facts if fact.namespace_usage and not fact.readable]
    if unreadable:
        yield error(
            f'role "{role}" may not read {_count(unreadable, "table")}',
            f"no SELECT on {_listed(unreadable)}, or on a partition of it",
            f"Run GRANT SELECT ON {unreadable[0]} TO {quote_identifier(role)}; for each of them.",
        )
    filtered = [fact.name.quoted for fact in facts if fact.row_security]
    if filtered:
        yield error(
            f'row security hides rows of {_count(filtered, "table")} from role "{role}"',
            f"active on {_listed(filtered)}; the copy would miss rows that the stream sends",
            f"Run ALTER ROLE {quote_identifier(role)} BYPASSRLS;.",
        )


def _identities(publication: PublicationOptions, facts: Sequence[TableFacts]) -> Iterator[Finding]:
    if not (publication.update or publication.delete):
        return
    keyless = [fact.name.quoted for fact in facts if not fact.has_identity]
    if keyless:
        yield warning(
            f"{_count(keyless, 'table')} without a usable replica identity",
            f"Postgres refuses UPDATE and DELETE on {_listed(keyless)} while they are published",
            f"Add a primary key, or run ALTER TABLE {keyless[0]} REPLICA IDENTITY FULL; for each of them.",
        )
    for fact in facts:
        if fact.leaves_differ:
            yield warning(
                f"the partitions of {fact.name} have no replica identity in common that identifies a row: it is not replicated",
                fact.leaves_differ,
                "Give all its partitions the same primary key, with the partition key in it, or set REPLICA IDENTITY FULL on "
                f"every one of them; then run `headwater rollback` for {fact.name}.",
            )
    partial = [fact.name.quoted for fact in facts if fact.has_identity and not fact.identity_published]
    if partial:
        yield warning(
            f"the column lists of {_count(partial, 'table')} leave out the replica identity",
            f"Postgres refuses UPDATE and DELETE on {_listed(partial)} while they are published",
            f"Add the identity's columns to the column lists, or remove the column lists, for example that of {partial[0]}.",
        )


def _left_out(
    connection: Connection, publication: PublicationOptions, facts: Sequence[TableFacts]
) -> Iterator[Finding]:
    """What a user would expect in the lake and not find there."""
    for fact in facts:
        if fact.unlogged is not None:
            yield warning(f"{fact.unlogged.message}: it is not replicated", fact.unlogged.detail, fact.unlogged.hint)
    unsent = [f"{fact.name}.{column}" for fact in facts for column in fact.unsent]
    if unsent:
        version = connection.info.server_version
        yield warning(
            f"{_count(unsent, 'generated column')} will not be in the lake",
            f"the publication does not send {_listed(unsent)}",
            f"Run ALTER PUBLICATION {quote_identifier(publication.name)} SET (publish_generated_columns = stored);."
            if version >= 180000
            else "Postgres publishes generated columns from version 18 on; compute them in a view of the lake table.",
        )
    roots = sorted({str(fact.part_of) for fact in facts if fact.part_of is not None})
    if roots and not publication.via_partition_root:
        yield warning(
            f"{_count(roots, 'partitioned table')} will be one lake table for each partition",
            f"publish_via_partition_root is off, and {_listed(roots)} is published by its partitions",
            f"If this is not intended, run ALTER PUBLICATION {quote_identifier(publication.name)} "
            "SET (publish_via_partition_root = true);.",
        )


def _locks(tables: Sequence[PublishedTable], most: int) -> Iterator[Finding]:
    many = {str(table.name): table.relation_count for table in tables if table.relation_count > most}
    if many:
        largest = max(many.values())
        yield warning(
            f"{_count(list(many), 'table')} with more partitions than may be locked at once",
            f"{_listed(many)}: up to {largest:,} relations, and one copy locks {most:,} at most, to leave room for others in the "
            "server's lock table; a VACUUM FULL, TRUNCATE or rewrite of a partition makes such a copy start again",
            "No action is needed, unless copies start again for that reason; then raise max_locks_per_transaction and restart "
            "the server.",
        )


def _count(names: Sequence[str], what: str) -> str:
    return f"1 {what}" if len(names) == 1 else f"{len(names)} {what}s"


def _listed(names: Iterable[str]) -> str:
    all_names = list(names)
    shown = ", ".join(all_names[:_NAMES_SHOWN])
    more = len(all_names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
