"""Whose changes are they? The decoder asks for every table of a batch.

A table whose RELATION is not that of its copy is neither worker's: the decoder puts it into the batch's `changed`, and it is
copied again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headwater.changes import StreamLeaf
from headwater.engine.copied_schemas import CopiedSchemas
from headwater.engine.hand_off import ApplyHandOff
from headwater.engine.table_states import TableStates
from headwater.lsn import CommitLsn, EndLsn
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.source.publication import OWN_NAMESPACE
from headwater.wire.pgoutput import MISMATCH, Answer, Ownership
from headwater.wire.relation import RelationMessage


class TextNeeded(Exception):
    """A table has a type whose binary form we do not read: the slot must be followed in text form."""


def needs_text(schema: ReplicatedTableSchema) -> bool:
    return not all(column.type.binary for column in schema.columns)


def _carries(schema: ReplicatedTableSchema | None, leaf: StreamLeaf) -> bool:
    """Whether old tuples of the leaf have what the copy of its root relies on."""
    identity = schema.table_schema.leaves if schema is not None else None
    return identity is None or identity.is_carried_by(leaf.replica_identity, leaf.flagged)


class ApplyOwnership:
    """The apply worker's view: tables that are Ready, or handed over, each from where `ApplyHandOff` says."""

    def __init__(self, hand_off: ApplyHandOff, table_states: TableStates, schemas: CopiedSchemas) -> None:
        self.binary = True
        self._hand_off = hand_off
        self._table_states = table_states
        self._schemas = schemas

    def assign(self, relation: RelationMessage, commit_lsn: CommitLsn) -> Answer:
        if relation.name.namespace == OWN_NAMESPACE:
            return None
        from_lsn = self._from(relation.id)
        if from_lsn is None:
            return None
        schema = self._schemas.of(relation.id, relation)
        if schema is None or not relation.matches(schema):
            return MISMATCH
        if self.binary and needs_text(schema):
            raise TextNeeded(f"table {schema.name} has a type without a binary decoder")
        return Ownership(schema, from_lsn)

    def changed_by(self, leaves: Iterable[StreamLeaf]) -> set[TableId]:
        return {
            leaf.root_id
            for leaf in leaves
            if self._from(leaf.root_id) is not None and not _carries(self._schemas.of(leaf.root_id), leaf)
        }

    def _from(self, table_id: TableId) -> EndLsn | None:
        return self._hand_off.owned_from(self._table_states.get(table_id))


class TableSyncOwnership:
    """A table sync worker's view: its own tables, from its slot's consistent point on, until each is handed over."""

    def __init__(self, schemas: Iterable[ReplicatedTableSchema], start: EndLsn) -> None:
        self._schemas = {schema.id: schema for schema in schemas}
        self._start = start
        self.binary = not any(needs_text(schema) for schema in self._schemas.values())

    def keep(self, tables: Collection[TableId]) -> None:
        """No other tables' changes from here on."""
        self._schemas = {id: schema for id, schema in self._schemas.items() if id in tables}

    def assign(self, relation: RelationMessage, commit_lsn: CommitLsn) -> Answer:
        schema = self._schemas.get(relation.id)
        if schema is None:
            return None
        return Ownership(schema, self._start) if relation.matches(schema) else MISMATCH

    def changed_by(self, leaves: Iterable[StreamLeaf]) -> set[TableId]:
        return {
            leaf.root_id
            for leaf in leaves
            if leaf.root_id in self._schemas and not _carries(self._schemas[leaf.root_id], leaf)
        }
