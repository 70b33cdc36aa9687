"""What the leaves of a published root have in common, as an error where that names no row, and whether it does in the data."""

from __future__ import annotations

import psycopg
from psycopg import sql

from headwater.errors import Retry, SchemaError
from headwater.schema.leaves import LeafIdentity, NoCommonIdentity
from headwater.schema.table import quote_identifier
from headwater.source.differences import leaf_identity
from headwater.source.fingerprint import Fingerprint
from headwater.source.publication import PublishedTable
from headwater.source.session import connect, translated
from headwater.wire.settings import ConnectSettings


def identity_of_leaves(table: Fingerprint) -> LeafIdentity:
    """Raises SchemaError with what to alter."""
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
        f"the partitions of {table.table_name} have no replica identity in common that names a row",
        detail=f"partition {leaf}: {error.why}; under publish_via_partition_root an UPDATE or DELETE carries the partition's "
        "identity, not the root's",
        hint=f"Give {name} a primary key, or all its partitions the same one, with the partition key in it "
        f"(ALTER TABLE {leaf} ADD PRIMARY KEY ...; ALTER TABLE {leaf} REPLICA IDENTITY DEFAULT;), or set REPLICA IDENTITY "
        f"FULL on every partition; then run `headwater rollback` for {table.table_name}.",
        retry=Retry.MANUAL,
    )


def check_unique(
    settings: ConnectSettings, exported_snapshot: str, table: PublishedTable, key: tuple[str, ...]
) -> None:
    """The partitions' key does not tell the partition: rows of two of them may have the same one. Counted in the source."""
    listed = sql.SQL(", ").join(sql.Identifier(name) for name in key)
    condition = sql.SQL("WHERE " + table.row_filter if table.row_filter else "")
    with connect(settings, autocommit=False) as connection:
        try:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(exported_snapshot))
            row = connection.execute(
                sql.SQL("SELECT count(*) FROM (SELECT FROM {} {} GROUP BY {} HAVING count(*) > 1) AS twice").format(
                    sql.Identifier(table.name.namespace, table.name.name), condition, listed
                )
            ).fetchone()
        except psycopg.Error as error:
            raise translated(error, f"counting the keys of {table.name}") from error
    if row is not None and row[0]:
        raise SchemaError(
            f"the key of {table.name} names more than one row",
            detail=f"({', '.join(key)}) is unique in each partition and not over all of them: {row[0]} keys occur more than once",
            hint=f"Put the partition key into the partitions' primary keys; then run `headwater rollback` for {table.name}.",
            retry=Retry.MANUAL,
        )
