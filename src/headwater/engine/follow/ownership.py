"""Whose changes are they? Asked by the decoder for every table of a batch.

The apply worker owns a table from Ready, or from SyncDone(lsn) for transactions at or past it. A table whose Relation is
no longer what was copied is owned by nobody: it is told, and copied again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from headwater.changes import StreamLeaf
from headwater.engine.run import Run
from headwater.lsn import ZERO, CommitLsn, EndLsn
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.source.publication import OWN_NAMESPACE
from headwater.states import Phase
from headwater.wire.pgoutput import MISMATCH, Mismatch, Ownership
from headwater.wire.relation import RelationMessage


class TextNeeded(Exception):
    """A table has a type whose binary form we do not read: the slot must be followed in text form."""


def needs_text(schema: ReplicatedTableSchema) -> bool:
    return not all(column.type.binary for column in schema.columns)


def _carries(schema: ReplicatedTableSchema | None, leaf: StreamLeaf) -> bool:
    identity = schema.table_schema.leaves if schema is not None else None
    return identity is None or identity.is_carried_by(leaf.replica_identity, leaf.flagged)


class ApplyOwnership:
    def __init__(self, run: Run) -> None:
        self._run = run
        self.binary = True

    def assign(self, relation: RelationMessage, commit_lsn: CommitLsn) -> Ownership | Literal[Mismatch.MISMATCH] | None:
        if relation.name.namespace == OWN_NAMESPACE:
            return None
        from_lsn = self._from(relation.id)
        if from_lsn is None:
            return None
        schema = self._run.stored_schema(relation.id, relation)
        if schema is None or not relation.matches(schema):
            return MISMATCH
        if self.binary and needs_text(schema):
            raise TextNeeded(f"table {schema.name} has a type without a binary decoder")
        return Ownership(schema, from_lsn)

    def changed_by(self, leaves: Iterable[StreamLeaf]) -> set[TableId]:
        """The roots of leaves whose old tuples are not what the copy relies on."""
        return {
            leaf.root_id
            for leaf in leaves
            if self._from(leaf.root_id) is not None and not _carries(self._run.stored_schema(leaf.root_id), leaf)
        }

    def _from(self, table_id: TableId) -> EndLsn | None:
        state = self._run.table_states.get(table_id)
        if state is None:
            return None
        if state.phase is Phase.READY:
            return ZERO
        if state.phase is Phase.SYNC_DONE:
            return state.lsn
        return None


class SyncOwnership:
    """A table sync worker's view: its own tables, from its slot's consistent point on, until each is out of its hands."""

    def __init__(self, schemas: Iterable[ReplicatedTableSchema], start: EndLsn) -> None:
        self._schemas = {schema.id: schema for schema in schemas}
        self._start = start

    def keep(self, tables: Collection[TableId]) -> None:
        """No other tables' changes from here on."""
        self._schemas = {id: schema for id, schema in self._schemas.items() if id in tables}

    def assign(self, relation: RelationMessage, commit_lsn: CommitLsn) -> Ownership | Literal[Mismatch.MISMATCH] | None:
        schema = self._schemas.get(relation.id)
        if schema is None:
            return None
        if not relation.matches(schema):
            return MISMATCH
        return Ownership(schema, self._start)

    def changed_by(self, leaves: Iterable[StreamLeaf]) -> set[TableId]:
        return {
            leaf.root_id
            for leaf in leaves
            if leaf.root_id in self._schemas and not _carries(self._schemas[leaf.root_id], leaf)
        }
