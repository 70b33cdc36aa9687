"""A look at the catalog: the fingerprints of every published table, at one moment, and the positions around it.

A look opens no table, so no lock of another session can block it, and reads in full only the tables whose digest differs from
the one of the look before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.source.fingerprint import (
    ColumnFacts,
    Fingerprint,
    IdentityFacts,
    PartFacts,
    PublicationFacts,
    StorageFacts,
)
from headwater.source.publication import published_relations
from headwater.source.session import Connection, fetch_all, fetch_one, translating

_FIRST_USER_OID = 16384

# A deferrable primary key identifies nothing within a transaction, and the server does not use it as identity either.
# Names and not numbers: a leaf may have its columns in another order.
_IDENTITY = """
    SELECT json_build_array({c}.relreplident,
        (SELECT json_build_array(coalesce(con.oid, 0)::bigint, {names}) FROM pg_index i
         LEFT JOIN pg_constraint con ON con.conindid = i.indexrelid AND con.contype = 'p' AND con.conrelid = i.indrelid
         WHERE i.indrelid = {c}.oid AND i.indisprimary AND i.indimmediate AND i.indisvalid),
        (SELECT {names} FROM pg_index i WHERE i.indrelid = {c}.oid AND i.indisreplident AND i.indisvalid AND i.indimmediate))
"""
_NAMES = """(SELECT json_agg(a.attname ORDER BY a.attnum) FROM pg_attribute a
                  WHERE a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))"""
_PARTITION_KEY = """
    (SELECT json_agg(coalesce(a.attname::text, ''))
     FROM pg_partitioned_table p CROSS JOIN unnest(p.partattrs::int2[]) AS k(attnum)
     LEFT JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = k.attnum WHERE p.partrelid = {c}.oid)
"""
# Made as a partition: the row of pg_inherits is of the transaction that made the relation, and so are the columns as they
# stand. ATTACH PARTITION, in the same transaction too, writes every column again. A system column is never written again.
# (A statement that was rolled back leaves its own number in cmin, and its transaction in xmax.)
_BORN = """
    EXISTS (SELECT FROM pg_inherits h JOIN pg_attribute s ON s.attrelid = h.inhrelid AND s.attnum = -1 AND s.xmin = h.xmin
            JOIN pg_attribute u ON u.attrelid = h.inhrelid AND u.attnum > 0 AND u.xmin = s.xmin AND u.cmin = s.cmin AND u.xmax = 0
            WHERE h.inhrelid = k.oid)
"""
_WRITTEN = """
    SELECT md5(string_agg(w.xmin::text, ',' ORDER BY w.attnum)) FROM pg_attribute w WHERE w.attrelid = k.oid AND w.attnum > 0
"""
_FACTS = """
SELECT c.oid::bigint AS id, n.nspname::text, c.relname::text, c.relkind::text,
       ARRAY[pub.oid::text, pub.version, pub.owner::text, pub.operations, pub.via_root::text, pub.generated,
             pub.place, pub.last_place] AS publication,
       published.ties, coalesce(md5(published.qual::text), '') AS row_filter, published.attrs::int[],
       a.attnums, a.names, a.types, a.typmods, a.generated, a.expressions,
       ({identity}) AS identity,
       ARRAY[c.relfilenode::text, c.reltoastrelid::text, c.xmin::text, c.relpersistence::text, a.written] AS storage,
       CASE WHEN c.relkind = 'p' THEN {partition_key} END AS partition_key,
       CASE WHEN c.relkind = 'p' THEN (
           SELECT json_agg(json_build_array(k.oid::bigint, k.relname, k.relkind, t.path, {born}, ({part_identity}),
               json_build_array(k.relfilenode::bigint, k.reltoastrelid::bigint, k.xmin::text, k.relpersistence,
                                ({written})),
               CASE WHEN k.relkind = 'p' THEN {part_key} END) ORDER BY k.oid)
           FROM tree t JOIN pg_class k ON k.oid = t.oid WHERE t.top = c.oid AND t.oid <> c.oid) END AS parts
FROM pub CROSS JOIN published
JOIN pg_class c ON c.oid = published.relid
JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (
    SELECT array_agg(attnum::int ORDER BY attnum) AS attnums,
           array_agg(attname::text ORDER BY attnum) AS names,
           array_agg(atttypid::bigint ORDER BY attnum) AS types,
           array_agg(atttypmod ORDER BY attnum) AS typmods,
           array_agg(attgenerated::text ORDER BY attnum) AS generated,
           array_agg(CASE WHEN attgenerated <> '' THEN (
               SELECT md5(d.adbin::text) FROM pg_attrdef d WHERE d.adrelid = attrelid AND d.adnum = attnum)
               ELSE '' END ORDER BY attnum) AS expressions,
           md5(string_agg(xmin::text, ',' ORDER BY attnum)) AS written
    FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped
) AS a
"""
_FACTS = (
    _FACTS.replace("{identity}", _IDENTITY.replace("{c}", "c"))
    .replace("{part_identity}", _IDENTITY.replace("{c}", "k"))
    .replace("{names}", _NAMES)
    .replace("{partition_key}", _PARTITION_KEY.replace("{c}", "c"))
    .replace("{part_key}", _PARTITION_KEY.replace("{c}", "k"))
    .replace("{born}", _BORN)
    .replace("{written}", _WRITTEN)
)
_DIGESTS = "SELECT f.id, md5(f::text) FROM ({facts}) AS f"
_IN_FULL = "SELECT md5(f::text), f.* FROM ({facts}) AS f WHERE %(wanted)s::bigint[] IS NULL OR f.id = ANY (%(wanted)s::bigint[])"

# What a value of the type looks like depends on all of it: an enum inside a domain inside an array inside a composite.
_TYPES = """
WITH RECURSIVE used(oid) AS (
    SELECT unnest(%s::oid[])
    UNION
    SELECT next.oid FROM used JOIN pg_type t ON t.oid = used.oid CROSS JOIN LATERAL (
        VALUES (t.typbasetype), (t.typelem)
        UNION ALL SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
        UNION ALL SELECT a.atttypid FROM pg_attribute a
                  WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    ) AS next(oid) WHERE next.oid >= 16384
)
SELECT t.oid::bigint, t.typtype::text, ARRAY[t.typbasetype::bigint, t.typtypmod, t.typelem::bigint],
       (SELECT json_object_agg(e.oid, json_build_array(e.enumlabel, e.xmin::text)) FROM pg_enum e WHERE e.enumtypid = t.oid),
       (SELECT json_agg(json_build_array(a.attnum, a.atttypid::bigint, a.atttypmod) ORDER BY a.attnum) FROM pg_attribute a
        WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped),
       (SELECT r.rngsubtype::bigint FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid))
FROM used JOIN pg_type t ON t.oid = used.oid
"""


@dataclass(frozen=True, slots=True)
class Look:
    """What the catalog shows of every published table, at one moment between two positions."""

    tables: Mapping[TableId, Fingerprint]
    since: EndLsn
    """Whatever was committed before it shows. (A commit is in the log a moment before it shows.)"""
    position: EndLsn
    """Whatever shows was committed before it."""


class CatalogLooks:
    """Looks at one publication, or at some of its tables. A table that did not change is the same object in two of them."""

    def __init__(self, publication: str, only: Sequence[TableId] | None = None) -> None:
        """At all its tables, or `only` at these."""
        self._publication = publication
        self._only = None if only is None else [int(id) for id in only]
        self._known: dict[TableId, tuple[str, Fingerprint]] = {}

    def look(self, connection: Connection) -> Look:
        """The session must be in autocommit."""
        since = insert_position(connection)
        with translating("looking at the catalog"), connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            tables = self._read(connection)
        return Look(tables, since, insert_position(connection))

    def _read(self, connection: Connection) -> dict[TableId, Fingerprint]:
        members = published_relations(connection.info.server_version)
        parameters: dict[str, Any] = {"publication": self._publication, "only": self._only}
        wanted, there = None, set[TableId]()
        if self._known:
            rows = fetch_all(connection, members + _DIGESTS.replace("{facts}", _FACTS), parameters, doing=_DOING)
            there = {TableId(id) for id, _ in rows}
            wanted = [id for id, digest in rows if self._known.get(id, ("",))[0] != digest]
        if wanted is None or wanted:
            statement = members + _IN_FULL.replace("{facts}", _FACTS)
            rows = fetch_all(connection, statement, {**parameters, "wanted": wanted}, doing=_DOING)
            read = {TableId(row[1]): (row[0], _fingerprint(*row[1:])) for row in rows}
            there |= read.keys()
        else:
            read = {}
        kept = {id: known for id, known in self._known.items() if id in there}
        self._known = self._with_types(connection, {**kept, **read})
        return {id: fingerprint for id, (_, fingerprint) in self._known.items()}

    def _with_types(
        self, connection: Connection, tables: Mapping[TableId, tuple[str, Fingerprint]]
    ) -> dict[TableId, tuple[str, Fingerprint]]:
        used = {
            column.type_oid
            for _, table in tables.values()
            for column in table.columns
            if column.type_oid >= _FIRST_USER_OID
        }
        rows = fetch_all(connection, _TYPES, (sorted(used),), doing=_DOING) if used else []
        types = {
            oid: {"kind": kind, "base": base, "labels": labels, "attributes": attributes, "subtype": subtype}
            for oid, kind, base, labels, attributes, subtype in rows
        }
        return {id: (digest, _with(table, _reachable(table, types))) for id, (digest, table) in tables.items()}


_DOING = "looking at the catalog"


def read_fingerprints(connection: Connection, publication: str) -> dict[TableId, Fingerprint]:
    """All published tables' fingerprints, read in full."""
    return dict(CatalogLooks(publication).look(connection).tables)


def insert_position(connection: Connection) -> EndLsn:
    """Every transaction that is visible now committed before it.

    What is flushed may lie behind that. The insert position at the beginning of a page is shown behind the page's header; a
    server at rest never sends as far as that, so the page's beginning is meant.
    """
    row = fetch_one(
        connection,
        """SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END::text,
                  current_setting('wal_block_size')::int""",
        doing="asking for the insert position",
    )
    assert row is not None
    position = EndLsn.parse(row[0])
    within = position.value % row[1]
    return EndLsn(position.value - within) if within in _PAGE_HEADERS else position


_PAGE_HEADERS = (24, 40)


def _fingerprint(
    id: int,
    namespace: str,
    name: str,
    kind: str,
    publication: list[str],
    ties: list[str],
    row_filter: str,
    column_list: list[int] | None,
    attnums: list[int] | None,
    names: list[str],
    types: list[int],
    typmods: list[int],
    generated: list[str],
    expressions: list[str],
    identity: list[Any],
    storage: list[str],
    partition_key: list[str] | None,
    parts: list[list[Any]] | None,
) -> Fingerprint:
    oid, version, owner, operations, via_root, *more = publication
    columns = zip(
        attnums or (), names or (), types or (), typmods or (), generated or (), expressions or (), strict=True
    )
    return Fingerprint(
        table_id=TableId(id),
        namespace=namespace,
        name=name,
        kind=kind,
        publication=PublicationFacts(int(oid), version, int(owner), operations, via_root == "true", *more),
        ties=tuple(ties),
        row_filter=row_filter,
        column_list=tuple(sorted(column_list)) if column_list is not None else None,
        columns=tuple(ColumnFacts(*column) for column in columns),
        identity=_read_identity(identity),
        storage=_read_storage(storage),
        partition_key=tuple(partition_key or ()),
        parts=tuple(
            PartFacts(oid, name, kind, path, born, _read_identity(identity), _read_storage(storage), tuple(key or ()))
            for oid, name, kind, path, born, identity, storage, key in parts or ()
        ),
    )


def _read_identity(value: list[Any]) -> IdentityFacts:
    kind, primary_key, index = value
    oid, names = primary_key if primary_key is not None else (0, [])
    return IdentityFacts(kind, tuple(names), oid, tuple(index or ()))


def _read_storage(value: list[Any]) -> StorageFacts:
    relfilenode, toast, changed_by, persistence, columns = value
    return StorageFacts(int(relfilenode), int(toast), int(changed_by), persistence, columns or "")


def _reachable(table: Fingerprint, types: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    waiting = [column.type_oid for column in table.columns]
    while waiting:
        oid = waiting.pop()
        if oid in types and str(oid) not in found:
            type = found[str(oid)] = types[oid]
            waiting += [type["base"][0], type["base"][2], *([type["subtype"]] if type["subtype"] else [])]
            waiting += [attribute[1] for attribute in type["attributes"] or ()]
    return found


def _with(table: Fingerprint, types: Mapping[str, Any]) -> Fingerprint:
    """The same object where nothing is different."""
    if table.types == types:
        return table
    return Fingerprint(**{name: getattr(table, name) for name in Fingerprint.__slots__ if name != "types"}, types=types)
