"""The Relation and Truncate messages of pgoutput, read one by one: they are rare."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from headwater.errors import ProtocolError
from headwater.schema.table import ReplicatedTableSchema, TableId, TableName


@dataclass(frozen=True, slots=True)
class RelationColumn:
    key: bool
    name: str
    type_oid: int
    typmod: int


@dataclass(frozen=True, slots=True)
class RelationMessage:
    """A table as the stream describes it in this connection."""

    id: TableId
    name: TableName
    replica_identity: str
    columns: tuple[RelationColumn, ...]

    @property
    def _identity(self) -> str:
        """An identity index that was dropped leaves the table marked with it, and no identity."""
        lost_index = self.replica_identity == "i" and not any(column.key for column in self.columns)
        return "n" if lost_index else self.replica_identity

    @property
    def flagged(self) -> frozenset[str]:
        """The columns of its identity; with FULL every column, which says nothing about the key."""
        return frozenset(column.name for column in self.columns if column.key)

    def matches(self, schema: ReplicatedTableSchema) -> bool:
        """Whether rows of this relation are rows of that schema: same columns, types, order and identity."""
        return (
            self.name == schema.name
            and self._identity == schema.table_schema.replica_identity.value
            and (self.replica_identity == "f" or self.flagged == schema.identity)
            and [(c.name, c.type_oid, c.typmod) for c in self.columns]
            == [(c.name, c.type.oid, c.typmod) for c in schema.columns]
        )


class _Reader:
    def __init__(self, data: bytes, offset: int) -> None:
        self._data, self._base, self._pos = data, offset, 0

    def unpack(self, layout: str) -> tuple[int, ...]:
        size = struct.calcsize(layout)
        if self._pos + size > len(self._data):
            raise ProtocolError("pgoutput message ends too early", offset=self._base + self._pos)
        values = struct.unpack_from(layout, self._data, self._pos)
        self._pos += size
        return values

    def text(self) -> str:
        end = self._data.find(b"\0", self._pos)
        if end < 0:
            raise ProtocolError("string without its end in a pgoutput message", offset=self._base + self._pos)
        try:
            value = self._data[self._pos : end].decode()
        except UnicodeDecodeError:
            raise ProtocolError("name that is not UTF-8", offset=self._base + self._pos) from None
        self._pos = end + 1
        return value

    def finish(self) -> None:
        if self._pos != len(self._data):
            raise ProtocolError("pgoutput message longer than its content", offset=self._base + self._pos)


def parse_relation(data: bytes, offset: int = 0) -> RelationMessage:
    reader = _Reader(data, offset)
    _, oid = reader.unpack("!cI")
    # An empty namespace stands for pg_catalog.
    namespace, name = reader.text() or "pg_catalog", reader.text()
    identity, count = reader.unpack("!cH")
    columns = []
    for _ in range(count):
        (flags,) = reader.unpack("!B")
        column = reader.text()
        type_oid, typmod = reader.unpack("!Ii")
        columns.append(RelationColumn(bool(flags & 1), column, type_oid, typmod))
    reader.finish()
    return RelationMessage(TableId(oid), TableName(namespace, name), identity.decode("latin-1"), tuple(columns))  # type: ignore[attr-defined]


def parse_truncate(data: bytes, offset: int = 0) -> tuple[tuple[TableId, ...], bool, bool]:
    """(tables, cascade, restart identity)"""
    reader = _Reader(data, offset)
    _, count, options = reader.unpack("!cIB")
    if count * 4 > len(data):
        raise ProtocolError("TRUNCATE of more tables than its message can name", offset=offset + 1)
    tables = tuple(TableId(oid) for oid in reader.unpack(f"!{count}I"))
    reader.finish()
    return tables, bool(options & 1), bool(options & 2)
