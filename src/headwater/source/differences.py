"""What a difference between two fingerprints of a table means. Pure: two fingerprints and what the stream showed go in, reasons
come out.

A difference is either proven to be harmless, and a comment here says why, or it is a reason to copy the table again: what is in
doubt is never taken for harmless. Harmless, because the fingerprint does not hold it: COMMENT, ANALYZE, VACUUM, CREATE INDEX,
statistics, storage of columns, triggers, row security, defaults, NOT NULL, rights and owners of tables and columns.

What the stream itself shows is not compared here: a column, a name or an identity that was another one for a while, and
is the same again, comes as a RELATION before the first row that was written meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from headwater.lsn import EndLsn
from headwater.schema.leaves import Leaf, LeafIdentity, NoCommonIdentity, common_identity
from headwater.source.fingerprint import ColumnFacts, Fingerprint, PartFacts, PublicationFacts, StorageFacts


@dataclass(frozen=True, slots=True)
class Difference:
    reason: str
    """For the log: what changed, in words that follow the table's name."""
    storage: StorageFacts | None = None
    """Set where a TRUNCATE in the stream would explain the difference: what the catalog shows now."""


@dataclass(frozen=True, slots=True)
class ToldTruncates:
    """The TRUNCATEs of a table that the stream brought since its fingerprint was taken, by the xids of their transactions."""

    xids: Collection[int] = ()

    def __bool__(self) -> bool:
        return bool(self.xids)


def differences(before: Fingerprint, now: Fingerprint) -> list[Difference]:
    """Everything that is not harmless."""
    return [
        *(Difference(reason) for reason in _told_in_words(before, now)),
        *_own_storage(before, now),
        *_parts(before, now),
    ]


def unexplained(found: list[Difference], told: ToldTruncates) -> list[Difference]:
    """The differences that no TRUNCATE explains which the stream brought until then.

    By the xid of its transaction. Under a savepoint the catalog has another xid, which no message carries: in doubt.
    """
    return [
        difference
        for difference in found
        if difference.storage is None or difference.storage.changed_by not in told.xids
    ]


def gone_leaves(before: Fingerprint, now: Fingerprint, since: EndLsn) -> list[Difference]:
    """Partitions that had changes and do not show at a look that began behind these: they were attached and detached, or
    created and dropped, and their rows with them."""
    there = {part.oid for part in now.parts}
    return [
        Difference(f'partition "{leaf.name}" had changes and does not exist any more')
        for leaf in before.unseen
        if leaf.oid not in there and leaf.commit_lsn < since.value
    ]


def taken_over(before: Fingerprint, now: Fingerprint) -> Fingerprint:
    """What a look found, as the table's new fingerprint: what only the old one has is taken from there."""
    there = {part.oid for part in now.parts}
    unseen = tuple(leaf for leaf in before.unseen if leaf.oid not in there)
    return replace(now, unseen=unseen, copied_at=before.copied_at)


def leaf_identity(table: Fingerprint) -> LeafIdentity:
    """Raises NoCommonIdentity."""
    leaves = [Leaf(part.name, part.identity.columns, part.identity.primary_key) for part in table.leaves]
    keys = [table.partition_key, *(part.partition_key for part in table.parts if not part.is_leaf)]
    return common_identity(table.identity.primary_key, leaves, keys)


def _told_in_words(before: Fingerprint, now: Fingerprint) -> Iterator[str]:
    if before.table_name != now.table_name:
        yield f"it was renamed, from {before.table_name}"
    yield from _publication(before, now)
    yield from _columns(before, now)
    yield from _types(before, now)
    yield from _identity(before, now)
    if before.storage.persistence != now.storage.persistence:
        yield "SET LOGGED or SET UNLOGGED was run"


def _publication(before: Fingerprint, now: Fingerprint) -> Iterator[str]:
    old, new = before.publication, now.publication
    if old.oid != new.oid:
        yield "the publication was dropped and created again"
    elif (old.operations, old.via_root, old.generated) != (new.operations, new.via_root, new.generated):
        yield "the publication's options were changed"
    elif old.version != new.version and not _is_new_owner_alone(old, new):
        yield "the publication was altered (RENAME or SET): changes in between may not have been published"
    if set(before.ties).isdisjoint(now.ties):
        yield "it was dropped from the publication and added again"
    elif before.ties != now.ties and (_is_limited(before) or _is_limited(now)):
        # It is still published, by another entry: which row filter and column list held meanwhile is not known.
        yield "the publication names it in another way (FOR TABLE, TABLES IN SCHEMA, or a parent table)"
    if before.row_filter != now.row_filter:
        yield "its row filter was changed"
    if before.column_list != now.column_list:
        yield "its column list was changed"


def _is_new_owner_alone(old: PublicationFacts, new: PublicationFacts) -> bool:
    """Another owner changes nothing of what is published. But a RENAME or SET that was undone could hide behind it: only a row
    that was written once lies right behind what was the last one."""
    if old.owner == new.owner or not old.last_place:
        return False
    (block, line), place = (_place(text) for text in (old.last_place, new.place))
    return place == (block, line + 1)


def _place(text: str) -> tuple[int, int]:
    block, _, line = text.strip("()").partition(",")
    return int(block), int(line)


def _is_limited(table: Fingerprint) -> bool:
    return bool(table.row_filter) or table.column_list is not None


def _columns(before: Fingerprint, now: Fingerprint) -> Iterator[str]:
    """Columns that are not sent do not count. Numbers are never used again: a column that was dropped and added has another."""
    old, new = ({c.attnum: c for c in table.columns if table.replicates(c)} for table in (before, now))
    for attnum in sorted(old.keys() | new.keys()):
        if old.get(attnum) != new.get(attnum):
            yield _column(old.get(attnum), new.get(attnum))


def _column(old: ColumnFacts | None, new: ColumnFacts | None) -> str:
    if old is None:
        assert new is not None
        return f'column "{new.name}" was added'
    if new is None:
        return f'column "{old.name}" was dropped, or is not sent any more'
    if old.name != new.name:
        return f'column "{old.name}" was renamed to "{new.name}"'
    if (old.type_oid, old.typmod) != (new.type_oid, new.typmod):
        return f'the type of column "{new.name}" was changed'
    return f'the expression of generated column "{new.name}" was changed'


def _types(before: Fingerprint, now: Fingerprint) -> Iterator[str]:
    for oid in before.types.keys() & now.types.keys():
        old, new = before.types[oid], now.types[oid]
        labels, others = old["labels"] or {}, new["labels"] or {}
        # A label that was added is in no row that was written before. One that was renamed and is called the same again, by
        # another transaction: rows that were written meanwhile came with the other name, and do not come again.
        if any(others.get(label) != known for label, known in labels.items()):
            yield "a label of an enum type was renamed"
        if {**old, "labels": None} != {**new, "labels": None}:
            yield "a type that its columns use was altered"


def _identity(before: Fingerprint, now: Fingerprint) -> Iterator[str]:
    old, new = before.identity, now.identity
    if (old.kind, old.primary_key, old.index) != (new.kind, new.primary_key, new.index):
        yield "its replica identity or primary key was changed"
    elif old.kind == "f" and old.primary_key_oid != new.primary_key_oid:
        # With FULL, RELATION flags every column: it does not show that the primary key, the mirror's key, was dropped meanwhile.
        yield "its primary key was dropped and created again"


def _own_storage(before: Fingerprint, now: Fingerprint) -> Iterator[Difference]:
    if now.kind == "p":
        return
    old, new = before.storage, now.storage
    if _is_rewritten(old, new):
        yield Difference("its rows were rewritten (ALTER TABLE, or SET UNLOGGED and SET LOGGED)")
    elif old.relfilenode != new.relfilenode and not new.toast:
        # With a TOAST relation this is VACUUM FULL, CLUSTER or a TRUNCATE, which the stream brings.
        yield Difference(
            "its storage was replaced (VACUUM FULL or a rewriting ALTER TABLE; they look alike)", _by_truncate(old, new)
        )


def _is_rewritten(old: StorageFacts, new: StorageFacts) -> bool:
    # A TOAST relation that was not there before came with a column, which may be gone again; what replaced the storage then
    # is not known.
    return old.relfilenode != new.relfilenode and old.toast != new.toast


def _by_truncate(old: StorageFacts, new: StorageFacts) -> StorageFacts | None:
    """What a TRUNCATE may explain. An ALTER TABLE behind it, in the same transaction, may have rewritten what was inserted
    between the two: it writes columns, perhaps under a savepoint's number."""
    return new if old.columns == new.columns else None


def _parts(before: Fingerprint, now: Fingerprint) -> Iterator[Difference]:
    old, new = ({part.oid: part for part in table.parts} for table in (before, now))
    for oid in sorted(old.keys() - new.keys()):
        yield Difference(f'partition "{old[oid].name}" was detached or dropped')
    for oid in sorted(new.keys() - old.keys()):
        yield from _joined(new[oid])
    for oid in sorted(old.keys() & new.keys()):
        yield from _stayed(old[oid], new[oid])
    if now.kind == "p" and _common(before) != _common(now):
        yield Difference("the identity that its partitions have in common was changed")


def _joined(part: PartFacts) -> Iterator[Difference]:
    if not part.born:
        yield Difference(f'partition "{part.name}" was attached')
    elif part.is_leaf and part.storage.relfilenode != part.oid:
        # A relation that is new has its oid for a file name.
        yield Difference(f'new partition "{part.name}" was truncated or rewritten', part.storage)


def _stayed(old: PartFacts, new: PartFacts) -> Iterator[Difference]:
    """A new name or namespace of a partition concerns neither its rows nor the stream."""
    if old.attached != new.attached:
        yield Difference(f'partition "{new.name}" was detached and attached again')
    if not new.is_leaf:
        return
    if old.identity.kind == "f" and old.identity.primary_key_oid != new.identity.primary_key_oid:
        yield Difference(f'the primary key of partition "{new.name}" was changed')
    if old.storage.persistence != new.storage.persistence:
        yield Difference(f'SET LOGGED or SET UNLOGGED was run on partition "{new.name}"')
    elif _is_rewritten(old.storage, new.storage):
        yield Difference(f'the rows of partition "{new.name}" were rewritten')
    elif old.storage.relfilenode != new.storage.relfilenode:
        # TRUNCATE of a leaf is not sent under a published root, and leaves the same traces as VACUUM FULL.
        yield Difference(
            f'the storage of partition "{new.name}" was replaced (TRUNCATE or VACUUM FULL)',
            _by_truncate(old.storage, new.storage),
        )


def _common(table: Fingerprint) -> LeafIdentity | None:
    try:
        return leaf_identity(table)
    except NoCommonIdentity:
        return None
