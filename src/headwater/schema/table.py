"""A table as the engine knows it: columns, identity, and which columns are replicated.

`TableSchema` is one version of a source table; its `snapshot_id` says from which position on it holds.
`ReplicatedTableSchema` adds the mask of published columns and answers what the mirror's key is (invariant 13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NewType

from headwater.schema.leaves import LeafIdentity
from headwater.schema.types import Kind, PgType

TableId = NewType("TableId", int)
"""The table's oid in the source."""

SnapshotId = NewType("SnapshotId", int)
"""The position, as a number, from which on a schema version holds."""


class ReplicaIdentity(StrEnum):
    DEFAULT = "d"
    NOTHING = "n"
    FULL = "f"
    INDEX = "i"


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def quoted(self) -> str:
        return f"{quote_identifier(self.namespace)}.{quote_identifier(self.name)}"


def quote_identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class ColumnSchema:
    name: str
    type: PgType
    typmod: int = -1
    """As the attribute declares it, which is also what the stream's Relation says."""
    nullable: bool = True
    attnum: int = 0
    primary_key: bool = False

    @property
    def numeric_precision(self) -> tuple[int, int] | None:
        """(precision, scale) of a numeric that declares one; scale may be negative or exceed the precision."""
        base = self.type.element or self.type
        typmod = self.typmod if self.typmod >= 0 else self.type.base_typmod
        if base.kind is not Kind.NUMERIC or typmod < 4:
            return None
        packed = typmod - 4
        scale = packed & 0x7FF
        return packed >> 16 & 0xFFFF, scale - 0x800 if scale >= 0x400 else scale


@dataclass(frozen=True, slots=True)
class TableSchema:
    id: TableId
    name: TableName
    columns: tuple[ColumnSchema, ...]
    snapshot_id: SnapshotId = SnapshotId(0)
    replica_identity: ReplicaIdentity = ReplicaIdentity.DEFAULT
    identity_columns: tuple[str, ...] = ()
    """Columns of the index that REPLICA IDENTITY USING INDEX names; empty for the other identities."""
    leaves: LeafIdentity | None = None
    """Of a partitioned table: what its old tuples carry. What stands above is the root's own, as RELATION shows it."""

    def column(self, name: str) -> ColumnSchema:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    @property
    def primary_key(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns if c.primary_key)

    @property
    def strict_inserts(self) -> bool:
        """Whether an INSERT of a key that the target has is an error: the key is not sure to be unique over all leaves."""
        return self.leaves is not None and self.leaves.strict_inserts


@dataclass(frozen=True)
class ReplicatedTableSchema:
    """A table's schema and the columns of it that the publication sends, in the table's order."""

    table_schema: TableSchema
    replication_mask: tuple[bool, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.replication_mask:
            object.__setattr__(self, "replication_mask", (True,) * len(self.table_schema.columns))

    @property
    def id(self) -> TableId:
        return self.table_schema.id

    @property
    def name(self) -> TableName:
        return self.table_schema.name

    @cached_property
    def columns(self) -> tuple[ColumnSchema, ...]:
        pairs = zip(self.table_schema.columns, self.replication_mask, strict=True)
        return tuple(column for column, replicated in pairs if replicated)

    @cached_property
    def _identity_names(self) -> tuple[str, ...]:
        schema = self.table_schema
        if schema.replica_identity is ReplicaIdentity.INDEX:
            return schema.identity_columns
        if schema.replica_identity is ReplicaIdentity.NOTHING:
            return ()
        return schema.primary_key

    @cached_property
    def identity(self) -> frozenset[str]:
        """The published columns of the identity: what the stream flags as key."""
        return frozenset(self._identity_names) & {column.name for column in self.columns}

    @cached_property
    def key(self) -> tuple[str, ...]:
        """The mirror's key: what an old tuple is sure to carry. Empty where rows have no key at all."""
        leaves = self.table_schema.leaves
        names = self._identity_names if leaves is None else leaves.key
        return names if {column.name for column in self.columns}.issuperset(names) else ()

    @property
    def insert_only(self) -> bool:
        """No identity: Postgres refuses UPDATE and DELETE, so nothing but inserts and truncates can come."""
        leaves = self.table_schema.leaves
        is_full = self.table_schema.replica_identity is ReplicaIdentity.FULL if leaves is None else leaves.old_is_full
        return not self.key and not is_full


def schema_to_json(schema: TableSchema) -> dict[str, Any]:
    return {
        "id": schema.id,
        "namespace": schema.name.namespace,
        "name": schema.name.name,
        "snapshot_id": schema.snapshot_id,
        "replica_identity": schema.replica_identity.value,
        "identity_columns": list(schema.identity_columns),
        "leaves": None
        if schema.leaves is None
        else {
            "key": list(schema.leaves.key),
            "old_is_full": schema.leaves.old_is_full,
            "strict_inserts": schema.leaves.strict_inserts,
        },
        "columns": [
            {
                "name": c.name,
                "type": _type_to_json(c.type),
                "typmod": c.typmod,
                "nullable": c.nullable,
                "attnum": c.attnum,
                "primary_key": c.primary_key,
            }
            for c in schema.columns
        ],
    }


def schema_from_json(value: Mapping[str, Any]) -> TableSchema:
    return TableSchema(
        id=TableId(value["id"]),
        name=TableName(value["namespace"], value["name"]),
        snapshot_id=SnapshotId(value["snapshot_id"]),
        replica_identity=ReplicaIdentity(value["replica_identity"]),
        identity_columns=tuple(value["identity_columns"]),
        leaves=_leaves_from_json(value.get("leaves")),
        columns=tuple(
            ColumnSchema(
                name=c["name"],
                type=_type_from_json(c["type"]),
                typmod=c["typmod"],
                nullable=c["nullable"],
                attnum=c["attnum"],
                primary_key=c["primary_key"],
            )
            for c in value["columns"]
        ),
    )


def _leaves_from_json(value: Mapping[str, Any] | None) -> LeafIdentity | None:
    if value is None:
        return None
    return LeafIdentity(tuple(value["key"]), value["old_is_full"], value["strict_inserts"])


def _type_to_json(type: PgType) -> dict[str, Any]:
    element = _type_to_json(type.element) if type.element is not None else None
    return {
        "oid": type.oid,
        "name": type.name,
        "kind": type.kind.value,
        "element": element,
        "base_typmod": type.base_typmod,
    }


def _type_from_json(value: Mapping[str, Any]) -> PgType:
    element = _type_from_json(value["element"]) if value["element"] is not None else None
    return PgType(value["oid"], value["name"], Kind(value["kind"]), element, value["base_typmod"])
