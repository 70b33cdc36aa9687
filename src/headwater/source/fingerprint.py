"""What the catalog says of everything that decides what a table's rows are and what its stream means (invariant 17).

The stream shows rows and, before the first of them, columns. It does not show that a table was rewritten, attached, detached,
renamed, or dropped from the publication and added again, or that an enum label was renamed: that shows in the catalog alone. A
fingerprint holds what the catalog shows of it. What a difference between two of them means is decided in `differences`.

How it is read: `catalog_look`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headwater.schema.table import TableId, TableName

VERSION = 2


@dataclass(frozen=True, slots=True)
class PublicationFacts:
    oid: int
    version: str
    """The transaction that wrote the publication's row last: RENAME, SET and OWNER do, ADD TABLE does not."""
    owner: int
    operations: str
    via_root: bool
    generated: str
    place: str = ""
    """Where the row lies, and where the last row of pg_publication did: a row that is written once goes right behind it."""
    last_place: str = ""


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    attnum: int
    name: str
    type_oid: int
    typmod: int
    generated: str
    expression: str
    """A digest of what a generated column is made of."""


@dataclass(frozen=True, slots=True)
class IdentityFacts:
    """What old tuples of one relation carry, and what makes its rows unique."""

    kind: str
    primary_key: tuple[str, ...]
    primary_key_oid: int
    """Of the constraint: REINDEX CONCURRENTLY replaces the index and keeps it."""
    index: tuple[str, ...]
    """The columns of the index that REPLICA IDENTITY USING INDEX names."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """What an old tuple carries; None for every column, nothing where the server refuses UPDATE and DELETE."""
        if self.kind == "f":
            return None
        return self.primary_key if self.kind == "d" else self.index if self.kind == "i" else ()


@dataclass(frozen=True, slots=True)
class StorageFacts:
    relfilenode: int
    toast: int
    """The oid of the TOAST relation: a rewriting ALTER and SET LOGGED make a new one; VACUUM FULL, CLUSTER, TRUNCATE don't."""
    changed_by: int
    """The transaction, or subtransaction, that wrote the row of pg_class last."""
    persistence: str
    columns: str = ""
    """Which transactions wrote the columns' rows: a TRUNCATE writes none of them, an ALTER TABLE that changes values does."""


@dataclass(frozen=True, slots=True)
class PartFacts:
    """A relation below a partitioned table: a leaf, or a partitioned table itself."""

    oid: int
    name: str
    kind: str
    attached: str
    """The rows of pg_inherits on the way to the root."""
    born: bool
    """Made as a partition, hence empty then, and not attached with rows in it."""
    identity: IdentityFacts
    storage: StorageFacts
    partition_key: tuple[str, ...]
    """Column names; an empty one stands for an expression."""

    @property
    def is_leaf(self) -> bool:
        return self.kind != "p"


@dataclass(frozen=True, slots=True)
class UnseenLeaf:
    """A partition whose changes the stream has brought, and that no look has shown yet."""

    oid: int
    name: str
    commit_lsn: int
    """Of the first of these changes."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    table_id: TableId
    namespace: str
    name: str
    kind: str
    publication: PublicationFacts
    ties: tuple[str, ...]
    row_filter: str
    column_list: tuple[int, ...] | None
    columns: tuple[ColumnFacts, ...]
    identity: IdentityFacts
    storage: StorageFacts
    partition_key: tuple[str, ...] = ()
    parts: tuple[PartFacts, ...] = ()
    types: Mapping[str, Any] = field(default_factory=dict)
    """Types of the source's own making, by oid: enum labels, attributes of composites, bases of domains."""
    unseen: tuple[UnseenLeaf, ...] = ()
    """If one of them does not show at a look behind its changes, it was detached or dropped, and no change says that its rows
    are gone."""
    copied_at: int = field(default=0, compare=False)
    """The position at which the copy's look at the catalog began: what went before it is in no copy."""

    @property
    def table_name(self) -> TableName:
        return TableName(self.namespace, self.name)

    @property
    def leaves(self) -> tuple[PartFacts, ...]:
        return tuple(part for part in self.parts if part.is_leaf)

    def needs_fresh_stream(self, server_version: int) -> bool:
        """Whether a stream that began before the copy may continue with what the publication was then.

        A walsender caches for each leaf what it is published as. SET SCHEMA of a table above the leaf changes that, where
        namespaces are published, and does not invalidate the cache: the walsender leaves the leaf's changes out, or sends them
        as the leaf's own, until it ends. (Postgres 15 to 18.) On 14 the same holds for ATTACH and DETACH PARTITION, which turn
        a table into a leaf and a leaf into a table.
        """
        by_namespace = [tie for tie in self.ties if tie.startswith("schema:")]
        return server_version < 150000 or any(self.kind == "p" or tie.count(":") > 1 for tie in by_namespace)

    def replicates(self, column: ColumnFacts) -> bool:
        """Whether the publication sends the column."""
        listed = self.column_list is None or column.attnum in self.column_list
        if not column.generated:
            return listed
        return (
            listed and column.generated == "s" and (self.column_list is not None or self.publication.generated == "s")
        )


def to_text(fingerprint: Fingerprint) -> str:
    """As a store keeps it."""
    return json.dumps({"version": VERSION, **asdict(fingerprint)}, separators=(",", ":"), sort_keys=True)


def from_text(text: str) -> Fingerprint | None:
    """None for one that another version of ours recorded in a form we do not read."""
    try:
        value = json.loads(text)
        if value.pop("version") != VERSION:
            return None
        value["publication"] = PublicationFacts(**value["publication"])
        value["columns"] = tuple(ColumnFacts(**column) for column in value["columns"])
        value["parts"] = tuple(_part(part) for part in value["parts"])
        value["identity"], value["storage"] = _identity(value["identity"]), StorageFacts(**value["storage"])
        for name in ("ties", "partition_key"):
            value[name] = tuple(value[name])
        value["unseen"] = tuple(UnseenLeaf(**leaf) for leaf in value["unseen"])
        if value["column_list"] is not None:
            value["column_list"] = tuple(value["column_list"])
        return Fingerprint(**value)
    except (ValueError, KeyError, TypeError):
        return None


def _identity(value: Mapping[str, Any]) -> IdentityFacts:
    return IdentityFacts(value["kind"], tuple(value["primary_key"]), value["primary_key_oid"], tuple(value["index"]))


def _part(value: Mapping[str, Any]) -> PartFacts:
    nested = {
        "identity": _identity(value["identity"]),
        "storage": StorageFacts(**value["storage"]),
        "partition_key": tuple(value["partition_key"]),
    }
    return PartFacts(**{**value, **nested})
