"""The replica identity that the leaves of a published root have in common: an error where it identifies no row, and a count
whether it does in the data."""

from __future__ import annotations

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from headwater.errors import Retry, SchemaError
from headwater.schema.leaves import LeafIdentity, NoCommonIdentity
from headwater.schema.table import quote_identifier
from headwater.source.differences import leaf_identity
from headwater.source.fingerprint import Fingerprint
from headwater.source.partitions import locks_to_read
from headwater.source.publication import PublishedTable
from headwater.source.same_relation import after_reading, require_same
from headwater.source.session import Connection, connect, translated
from headwater.wire.settings import ConnectSettings

_LOCK_SECONDS = 10


def identity_of_leaves(table: Fingerprint) -> LeafIdentity:
    """Raises SchemaError, which says what to alter."""
    if (unlogged := unlogged_leaf(table)) is not None:
        raise unlogged
    try:
        return leaf_identity(table)
    except NoCommonIdentity as error:
        raise no_common_identity(table, error) from error


def unlogged_leaf(table: Fingerprint) -> SchemaError | None:
    """Changes of an unlogged table are not in the WAL, so they are not in the stream."""
    leaf = next((part for part in table.leaves if part.storage.persistence != "p"), None)
    if leaf is None:
        return None
    name = quote_identifier(leaf.name)
    return SchemaError(
        f"a partition of {table.table_name} is unlogged",
        detail=f"the server sends no changes of partition {name}, so the lake table would miss them",
        hint=f"Run ALTER TABLE {name} SET LOGGED; the table is copied again then. Later: `headwater rollback` for "
        f"{table.table_name}.",
        retry=Retry.TIMED,
    )


def no_common_identity(table: Fingerprint, error: NoCommonIdentity) -> SchemaError:
    name, leaf = quote_identifier(table.namespace) + "." + quote_identifier(table.name), quote_identifier(error.leaf)
    return SchemaError(
        f"the partitions of {table.table_name} have no replica identity in common that identifies a row",
        detail=f"partition {leaf}: {error.why}; under publish_via_partition_root an UPDATE or DELETE carries the partition's "
        "identity, not the root's",
        hint=f"Give {name} a primary key, or all its partitions the same one, with the partition key in it "
        f"(ALTER TABLE {leaf} ADD PRIMARY KEY ...; ALTER TABLE {leaf} REPLICA IDENTITY DEFAULT;), or set REPLICA IDENTITY "
        f"FULL on every partition; then run `headwater rollback` for {table.table_name}.",
        retry=Retry.MANUAL,
    )


def check_unique(
    settings: ConnectSettings, exported_snapshot: str, table: PublishedTable, key: tuple[str, ...], most_locks: int
) -> None:
    """The partitions' key does not contain the partition key: rows of two of them may have the same one. Counted in the source.

    By a statement over all of them, which locks them and their indexes: more than `most_locks` is an error of the table. If
    another session has one of them locked, a ServerError with SQLSTATE 55P03 comes soon: that session may itself wait for the
    lock of our copy, and Postgres does not see this as a deadlock.
    """
    listed = sql.SQL(", ").join(sql.Identifier(name) for name in key)
    condition = sql.SQL("WHERE " + table.row_filter if table.row_filter else "")
    with connect(settings) as connection:
        _check_locks(connection, table, most_locks)
        connection.execute(f"SET lock_timeout = '{_LOCK_SECONDS}s'")
        connection.autocommit = False
        try:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(exported_snapshot))
            row = connection.execute(
                sql.SQL("SELECT count(*) FROM (SELECT FROM {} {} GROUP BY {} HAVING count(*) > 1) AS twice").format(
                    sql.Identifier(table.name.namespace, table.name.name), condition, listed
                )
            ).fetchone()
            cursor = connection.cursor(row_factory=dict_row)
            found = cursor.execute(after_reading(table.name, table.id).encode()).fetchone()
        except psycopg.Error as error:
            raise translated(error, f"counting the keys of {table.name}") from error
    assert found is not None
    require_same(table.name, None, found)
    if row is not None and row[0]:
        raise SchemaError(
            f"the key of {table.name} identifies more than one row",
            detail=f"({', '.join(key)}) is unique in each partition but not over all of them: {row[0]} keys occur more than once",
            hint=f"Put the partition key into the partitions' primary keys; then run `headwater rollback` for {table.name}.",
            retry=Retry.MANUAL,
        )


def _check_locks(connection: Connection, table: PublishedTable, most: int) -> None:
    needed = locks_to_read(connection, table.id)
    if needed > most:
        raise SchemaError(
            f"the key of {table.name} cannot be checked: it has too many partitions",
            detail=f"the partitions' key does not contain the partition key, so it may identify more than one row; counting "
            f"takes {needed:,} locks; one copy takes {most:,} at most, to leave room for others in the server's lock table",
            hint="Put the partition key into the partitions' primary keys, or raise max_locks_per_transaction and restart the "
            f"server; then run `headwater rollback` for {table.name}.",
            retry=Retry.MANUAL,
        )
