"""Postgres types as data: which decoder a value needs, and whether we read its binary form.

A `Kind` is a family of values that share a decoder and an Arrow type. Types without a kind of their own are `OTHER`: their
canonical text is kept, and because their binary form is unknown to us, a stream that carries one asks the server for text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    BOOL = "bool"
    INT2 = "int2"
    INT4 = "int4"
    INT8 = "int8"
    OID = "oid"
    FLOAT4 = "float4"
    FLOAT8 = "float8"
    NUMERIC = "numeric"
    TEXT = "text"
    JSONB = "jsonb"
    BYTEA = "bytea"
    DATE = "date"
    TIMESTAMP = "timestamp"
    TIMESTAMPTZ = "timestamptz"
    UUID = "uuid"
    ARRAY = "array"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class PgType:
    """A type as the catalog names it. Domains carry their base type's kind, enums are text, arrays name their element."""

    oid: int
    name: str
    kind: Kind
    element: PgType | None = None
    base_typmod: int = -1
    """A domain's own type modifier, which its columns inherit."""

    @property
    def binary(self) -> bool:
        """Whether we decode what the type's send function gives."""
        if self.element is not None:
            return self.element.binary
        return self.kind is not Kind.OTHER


_SCALARS: tuple[tuple[int, str, Kind, int], ...] = (
    # oid, name, kind, oid of its array type
    (16, "bool", Kind.BOOL, 1000),
    (17, "bytea", Kind.BYTEA, 1001),
    (18, "char", Kind.TEXT, 1002),
    (19, "name", Kind.TEXT, 1003),
    (20, "int8", Kind.INT8, 1016),
    (21, "int2", Kind.INT2, 1005),
    (23, "int4", Kind.INT4, 1007),
    (25, "text", Kind.TEXT, 1009),
    (26, "oid", Kind.OID, 1028),
    (114, "json", Kind.TEXT, 199),
    (700, "float4", Kind.FLOAT4, 1021),
    (701, "float8", Kind.FLOAT8, 1022),
    (1042, "bpchar", Kind.TEXT, 1014),
    (1043, "varchar", Kind.TEXT, 1015),
    (1082, "date", Kind.DATE, 1182),
    (1114, "timestamp", Kind.TIMESTAMP, 1115),
    (1184, "timestamptz", Kind.TIMESTAMPTZ, 1185),
    (1700, "numeric", Kind.NUMERIC, 1231),
    (2950, "uuid", Kind.UUID, 2951),
    (3802, "jsonb", Kind.JSONB, 3807),
)


def _built_in() -> dict[int, PgType]:
    types: dict[int, PgType] = {}
    for oid, name, kind, array_oid in _SCALARS:
        scalar = PgType(oid, name, kind)
        types[oid] = scalar
        types[array_oid] = PgType(array_oid, f"{name}[]", Kind.ARRAY, scalar)
    return types


BUILT_IN: dict[int, PgType] = _built_in()
"""Types whose oid is the same on every server."""

SAME_TEXT_IN_BINARY = frozenset({"citext"})
"""Extension types, found by name, whose send function gives their text."""


def other(oid: int, name: str) -> PgType:
    return PgType(oid, name, Kind.OTHER)
