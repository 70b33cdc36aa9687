"""User-defined types of the source, resolved to the kinds we decode: domains, enums, arrays of both, citext.

A type's oid never changes its meaning while the type exists, so what was resolved is kept for as long as the session.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import LiteralString
from weakref import WeakKeyDictionary

from headwater.schema.types import BUILT_IN, SAME_TEXT_IN_BINARY, Kind, PgType, other
from headwater.source.session import Connection, fetch_all

# A value as text, as the stream shows it: by the type's output function. A cast to text is another function for some types (it
# adds /32 to an inet). IS NOT NULL would be false for a composite value with a NULL in it.
TEXT_FORM: LiteralString = "CASE WHEN pg_catalog.num_nulls({0}) = 0 THEN pg_catalog.concat({0}) END"


@dataclass(frozen=True, slots=True)
class _CatalogType:
    oid: int
    name: str
    typtype: str
    base: int
    typmod: int
    element: int


# Follows domains to their bases and arrays to their elements. array_out tells a real array from the fixed-length and
# vector types, which have an element too and other text.
_TYPES = """
WITH RECURSIVE wanted(oid) AS (
    SELECT unnest(%s::oid[])
  UNION
    SELECT next.oid
    FROM wanted
    JOIN pg_type t ON t.oid = wanted.oid
    CROSS JOIN LATERAL (VALUES (t.typbasetype), (t.typelem)) AS next(oid)
    WHERE next.oid <> 0
)
SELECT t.oid::bigint, t.typname::text, t.typtype::text, t.typbasetype::bigint, t.typtypmod,
       CASE WHEN t.typoutput = 'array_out'::regproc THEN t.typelem::bigint ELSE 0 END
FROM wanted JOIN pg_type t ON t.oid = wanted.oid
"""

_memo: WeakKeyDictionary[Connection, dict[int, PgType]] = WeakKeyDictionary()


def resolve_types(connection: Connection, oids: Iterable[int]) -> dict[int, PgType]:
    """Every type of `oids`, from what is built in, what this session has resolved before, or one query."""
    known = _memo.setdefault(connection, {})
    wanted = set(oids)
    unknown = [oid for oid in wanted if oid not in BUILT_IN and oid not in known]
    if unknown:
        rows = fetch_all(connection, _TYPES, (unknown,), doing="reading types from the catalog")
        found = {row[0]: _CatalogType(*row) for row in rows}
        for oid in unknown:
            known[oid] = _resolve(oid, found)
    return {oid: BUILT_IN[oid] if oid in BUILT_IN else known[oid] for oid in wanted}


def _resolve(oid: int, found: dict[int, _CatalogType]) -> PgType:
    if oid in BUILT_IN:
        return BUILT_IN[oid]
    row = found.get(oid)
    if row is None:
        return other(oid, f"type {oid}")
    if row.typtype == "d":
        base = _resolve(row.base, found)
        # The innermost domain is the only one that can carry a typmod.
        typmod = base.base_typmod if base.base_typmod >= 0 else row.typmod
        return PgType(oid, row.name, base.kind, base.element, typmod)
    if row.typtype == "e" or row.name in SAME_TEXT_IN_BINARY:
        return PgType(oid, row.name, Kind.TEXT)
    if row.element:
        element = _resolve(row.element, found)
        # An array whose element is a domain over an array has no Arrow shape of ours; its text is kept whole.
        if element.kind not in (Kind.OTHER, Kind.ARRAY):
            return PgType(oid, f"{element.name}[]", Kind.ARRAY, element, element.base_typmod)
    return other(oid, row.name)
