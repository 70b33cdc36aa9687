"""The owner of a lake table: pipeline, cluster, database and source table together, in the table's properties.

Checked before a copy replaces its rows and before each batch. A table of another owner is never written to, unless the user
allowed that it is taken over. Which source table writes to a name of the lake right now is kept here too: two source tables
that swap their names write to each other's lake table for a moment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headwater.contracts.destination import RunContext
from headwater.contracts.stores import DestinationStore
from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.watermark import DATABASE_OID, PIPELINE_ID, SYSTEM_IDENTIFIER, TABLE_OID
from headwater.errors import LakeTableTaken, Retry
from headwater.schema.table import TableId, TableName
from headwater.states import Phase

SOURCE_TABLE = "headwater.source-table"


@dataclass(frozen=True, slots=True)
class Owner:
    """0 for an oid: a version before did not record it."""

    pipeline_id: int
    system_identifier: str
    database_oid: int
    table_id: int

    @classmethod
    def of(cls, context: RunContext, table_id: TableId) -> Owner:
        return cls(context.pipeline_id, context.system_identifier, context.database_oid, table_id)

    @classmethod
    def read(cls, table: LakeTable) -> Owner | None:
        """As the table's properties say; None for a table that no pipeline created."""
        pipeline = table.property(PIPELINE_ID)
        if pipeline is None:
            return None
        return cls(
            int(pipeline),
            table.property(SYSTEM_IDENTIFIER) or "",
            int(table.property(DATABASE_OID) or 0),
            int(table.property(TABLE_OID) or 0),
        )

    def properties(self, name: TableName) -> dict[str, str]:
        return {
            PIPELINE_ID: str(self.pipeline_id),
            SYSTEM_IDENTIFIER: self.system_identifier,
            DATABASE_OID: str(self.database_oid),
            TABLE_OID: str(self.table_id),
            SOURCE_TABLE: str(name),
        }

    def has_same_source(self, other: Owner) -> bool:
        """The same pipeline on the same database, if not the same table."""
        same = (self.pipeline_id, self.system_identifier) == (other.pipeline_id, other.system_identifier)
        return same and (self.database_oid == other.database_oid or 0 in (self.database_oid, other.database_oid))

    def is_same(self, other: Owner) -> bool:
        known = 0 not in (self.table_id, other.table_id)
        return self.has_same_source(other) and not (known and self.table_id != other.table_id)

    def __str__(self) -> str:
        return (
            f"pipeline {self.pipeline_id}, system {self.system_identifier}, database {self.database_oid}, "
            f"table {self.table_id}"
        )


def check_for_copy(table: LakeTable, mine: Owner, store: DestinationStore, *, name: TableName, take_over: bool) -> None:
    """May a copy replace what the table holds?"""
    owner = Owner.read(table)
    if take_over or (owner is not None and owner.is_same(mine)):
        return
    if owner is None:
        if table.may_have_rows:
            raise _not_ours(name, table, "no pipeline", mine)
        return
    if not owner.has_same_source(mine):
        raise _not_ours(name, table, str(owner), mine)
    # Dropped and created again under its name, or renamed: the name is free once the other table writes elsewhere.
    other = TableId(owner.table_id)
    others, state = store.get_destination_table_metadata(other), store.get_table_state(other)
    is_followed = state is None or state.phase not in (Phase.INIT, Phase.ERRORED)
    if is_followed and others is not None and others.destination_table_id == table.identifier:
        raise _still_written(name, table.identifier, owner.table_id)


def check_for_changes(table: LakeTable, mine: Owner, name: TableName | str) -> None:
    """May changes of this source table be applied to it?"""
    owner = Owner.read(table)
    if owner is None or owner.is_same(mine):
        return  # a table without an owner shows no watermark of ours, and that error says more
    if owner.has_same_source(mine):
        raise LakeTableTaken(
            f"lake table {table.identifier} holds another source table now",
            detail=f"it belongs to table {owner.table_id}; changes of {name} are of table {mine.table_id}",
            hint="The table is copied again, to the lake table of its current name.",
        )
    raise _not_ours(name, table, str(owner), mine)


class Writers:
    """Which source table writes to which lake table now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_work: dict[str, list[TableId]] = {}

    @contextmanager
    def writing(self, identifier: str, table_id: TableId, name: TableName) -> Iterator[None]:
        with self._lock:
            at_work = self._at_work.setdefault(identifier, [])
            other = next((table for table in at_work if table != table_id), None)
            if other is not None:
                raise _still_written(name, identifier, other)
            at_work.append(table_id)
        try:
            yield
        finally:
            with self._lock:
                at_work.remove(table_id)
                if not at_work:
                    del self._at_work[identifier]


def _still_written(name: TableName, identifier: str, other: int) -> LakeTableTaken:
    return LakeTableTaken(
        f"lake table {identifier} still receives changes of another source table",
        detail=f"it belongs to table {other} of the same pipeline, which had the name {name} before",
        hint="The copy is retried; it starts once the other table is written elsewhere or has left the publication.",
    )


def _not_ours(name: TableName | str, table: LakeTable, whose: str, mine: Owner) -> LakeTableTaken:
    return LakeTableTaken(
        f"lake table {table.identifier} has rows that this pipeline did not write",
        detail=f"it belongs to {whose}; this is {mine}",
        hint=f"Use another warehouse or catalog. To replace its rows: `headwater resync --take-over` for {name}.",
        retry=Retry.MANUAL,
    )
