"""The two sessions that a copy needs: one holds the lock, one holds the exported snapshot (invariant 1).

The lock comes first and stays until the copy is durable. The engine takes its snapshot from the slot it makes; a copy without a
slot takes it here. If either session ends before that, the copy starts again; it never continues.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from headwater.errors import SchemaError, StartAgain
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.source.catalog import load_table_schemas
from headwater.source.copy_origin import CopyOrigin
from headwater.source.copy_plan import TARGET_RANGE_BYTES, CopyPlan
from headwater.source.publication import PublishedTable, published_tables
from headwater.source.server import locks_for, system_identifier
from headwater.source.session import connect, fetch_one, translating
from headwater.source.table_lock import TableLock, TablesTaken, table_lock
from headwater.wire.settings import ConnectSettings

_ATTEMPTS = 5
_TAKEN_SECONDS = 60.0
_TRY_AGAIN_SECONDS = 0.2


@contextmanager
def export_snapshot(settings: ConnectSettings) -> Iterator[str]:
    """The name of a snapshot of this moment, exported without a slot, and valid until the context ends."""
    with closing(connect(settings)) as connection:
        with translating("exporting a snapshot"):
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = fetch_one(connection, "SELECT pg_export_snapshot()", doing="exporting a snapshot")
        assert row is not None
        yield str(row[0])


@dataclass(frozen=True, slots=True)
class SnapshotTable:
    schema: ReplicatedTableSchema
    plan: CopyPlan


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """Tables of a publication at one moment of one server, readable for as long as the context is open."""

    snapshot_name: str
    system_identifier: str
    settings: ConnectSettings
    tables: Mapping[str, SnapshotTable]
    lock: TableLock

    def options(self, table: str) -> dict[str, str]:
        """For `spark.read.format("postgres_copy").options(**...)`. Nothing secret: Spark shows options."""
        self._table(table)
        return {"exported_snapshot": self.snapshot_name, "table": table}

    def origin(self, table: str) -> CopyOrigin:
        found = self._table(table)
        return CopyOrigin(self.settings, self.snapshot_name, found.plan.server_started_at, found.schema.columns)

    def check(self) -> None:
        """Raises ConnectionLost if rows may be missing from what was read until now. Call it once more when all is written."""
        self.lock.check()

    def _table(self, table: str) -> SnapshotTable:
        found = self.tables.get(table)
        if found is None:
            raise _not_published([table], self.tables)
        return found


@contextmanager
def exported_snapshot(
    settings: ConnectSettings,
    publication: str,
    tables: Sequence[str] | None = None,
    *,
    target_range_bytes: int = TARGET_RANGE_BYTES,
    parallelism: int = 1,
) -> Iterator[ExportedSnapshot]:
    """Read tables of a publication (all, or those named "namespace.table") at one moment, without a pipeline.

    Row filters and column lists of the publication apply. Keep the context open until what was read is written, and call
    `check()` then.
    """
    with closing(connect(settings)) as catalog:
        most_relations = locks_for(catalog)
        published = _by_name(published_tables(catalog, publication))
        unknown = [name for name in tables or () if name not in published]
        if unknown:
            raise _not_published(unknown, published)
        wanted = {name: table for name, table in published.items() if tables is None or name in tables}
    with ExitStack() as held:
        for attempt in range(_ATTEMPTS):
            try:
                snapshot = _prepare(
                    held, settings, publication, wanted, most_relations, target_range_bytes, parallelism
                )
                break
            except StartAgain:
                # A partition was rewritten meanwhile; nothing was read yet.
                held.close()
                if attempt == _ATTEMPTS - 1:
                    raise
        yield snapshot


def _by_name(tables: Sequence[PublishedTable]) -> dict[str, PublishedTable]:
    """By namespace.name, or both quoted where dots make one name of two tables."""
    count = Counter(str(table.name) for table in tables)
    return {table.name.quoted if count[str(table.name)] > 1 else str(table.name): table for table in tables}


def _prepare(
    held: ExitStack,
    settings: ConnectSettings,
    publication: str,
    wanted: Mapping[str, PublishedTable],
    most_relations: int,
    target_range_bytes: int,
    parallelism: int,
) -> ExportedSnapshot:
    ids = [table.id for table in wanted.values()]
    lock = held.enter_context(_locked(settings, ids, most_relations))
    snapshot_name = held.enter_context(export_snapshot(settings))
    # Read under the lock: a column that was dropped before it is not planned for.
    schemas = load_table_schemas(lock.connection, ids, publication)
    planned = {
        name: SnapshotTable(
            schemas[table.id],
            lock.plan(table, schemas[table.id], target_range_bytes=target_range_bytes, parallelism=parallelism),
        )
        for name, table in wanted.items()
    }
    return ExportedSnapshot(snapshot_name, system_identifier(lock.connection), settings, planned, lock)


@contextmanager
def _locked(settings: ConnectSettings, ids: Sequence[TableId], most_relations: int) -> Iterator[TableLock]:
    """Locks all tables or none, and retries for a while: a session that has locked one and waits for another must not wait
    for us."""
    with ExitStack() as held:
        deadline = time.monotonic() + _TAKEN_SECONDS
        while True:
            try:
                lock = held.enter_context(table_lock(settings, ids, wait=len(ids) == 1, most_relations=most_relations))
                break
            except TablesTaken:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_TRY_AGAIN_SECONDS)
        yield lock


def _not_published(names: Sequence[str], known: Collection[str]) -> SchemaError:
    return SchemaError(
        f"the publication has no table {', '.join(names)}",
        detail=f"It has {', '.join(sorted(known)) or 'none'}.",
        hint="Name tables as namespace.table, without quotes, as the publication has them.",
    )
