"""The schema that each table was copied with: what its changes are decoded by, and what its RELATION is compared with."""

from __future__ import annotations

from headwater.contracts.stores import PipelineStore
from headwater.engine.table_states import TableStates
from headwater.schema.table import ReplicatedTableSchema, SnapshotId, TableId
from headwater.wire.relation import RelationMessage

_NEWEST = SnapshotId(2**63 - 1)


class CopiedSchemas:
    def __init__(self, store: PipelineStore, table_states: TableStates) -> None:
        self._store = store
        self._table_states = table_states

    def of(self, table_id: TableId, relation: RelationMessage | None = None) -> ReplicatedTableSchema | None:
        """The schema, and the columns of it that were copied.

        Without metadata of the destination, those that the fingerprint of the copy has: the stream may send fewer by now.
        """
        schema = self._store.get_table_schema(table_id, _NEWEST)
        if schema is None:
            return None
        metadata = self._store.get_destination_table_metadata(table_id)
        if metadata is not None:
            return ReplicatedTableSchema(schema, metadata.replication_mask)
        fingerprint = self._table_states.fingerprint(table_id)
        if fingerprint is not None:
            copied = {column.attnum for column in fingerprint.columns if fingerprint.replicates(column)}
            return ReplicatedTableSchema(schema, tuple(column.attnum in copied for column in schema.columns))
        if relation is None:
            return ReplicatedTableSchema(schema)
        sent = {column.name for column in relation.columns}
        return ReplicatedTableSchema(schema, tuple(column.name in sent for column in schema.columns))
