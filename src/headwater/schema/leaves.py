"""The identity of a partitioned table under a published root, computed over all its leaves (invariant 13).

RELATION describes the root, but each old tuple has the columns of the identity of the leaf that the row was in. So the mirror's
key is what every leaf's identity carries, and it identifies a row only if it is unique in every leaf and contains the partition
key.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Leaf:
    name: str
    identity: tuple[str, ...] | None
    """The columns that an old tuple carries; None for all, empty where the server refuses UPDATE and DELETE."""
    primary_key: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeafIdentity:
    """What all leaves have in common."""

    key: tuple[str, ...] = ()
    """Empty where rows have no key."""
    old_is_full: bool = False
    """Every leaf is FULL: an old tuple has all columns, whatever kind the root makes of it."""
    strict_inserts: bool = False
    """The key does not contain the partition key, so two leaves may have the same key: an INSERT of an existing key fails."""

    def is_carried_by(self, kind: str, identity: Collection[str]) -> bool:
        """Whether old tuples of a leaf have what we rely on: `kind` is its relreplident, `identity` the columns it flags."""
        if kind == "f":
            return self.old_is_full or bool(self.key)
        if self.old_is_full:
            return False
        if not self.key:
            return not identity
        return set(self.key) <= set(identity) or kind == "n"


class NoCommonIdentity(Exception):
    """The leaves' identities have nothing in common that identifies a row. `leaf` is the first one that prevents it."""

    def __init__(self, leaf: str, why: str) -> None:
        super().__init__(why)
        self.leaf = leaf
        self.why = why


def common_identity(
    root_key: tuple[str, ...], leaves: Sequence[Leaf], partition_keys: Sequence[tuple[str, ...]]
) -> LeafIdentity:
    """`partition_keys` are those of the root and of every partitioned table below it; an empty name is an expression."""
    if not leaves:
        return LeafIdentity(root_key)
    full = [leaf for leaf in leaves if leaf.identity is None]
    keyed = [leaf for leaf in leaves if leaf.identity]
    old_is_full = len(full) == len(leaves)
    key = _candidate(root_key, full, keyed)
    if key is None:
        # Whole rows are counted if every old tuple is one; without any identity the server allows nothing but inserts.
        if old_is_full or not (full or keyed):
            return LeafIdentity((), old_is_full)
        other = next(leaf for leaf in leaves if leaf.identity is not None)
        raise NoCommonIdentity(other.name, "it has no identity, while other partitions have REPLICA IDENTITY FULL")
    for leaf in leaves:
        if leaf.identity and not set(key) <= set(leaf.identity):
            raise NoCommonIdentity(leaf.name, f"its identity is ({', '.join(leaf.identity)})")
        if set(leaf.identity or ()) != set(key) and not _is_unique(leaf, key):
            raise NoCommonIdentity(leaf.name, f"no primary key or unique index makes ({', '.join(key)}) unique in it")
    tells_leaf = all(name in key for names in partition_keys for name in names)
    return LeafIdentity(key, old_is_full, strict_inserts=not tells_leaf)


def _candidate(root_key: tuple[str, ...], full: Sequence[Leaf], keyed: Sequence[Leaf]) -> tuple[str, ...] | None:
    if root_key and all(set(root_key) <= set(leaf.identity or ()) for leaf in keyed):
        return root_key
    if keyed:
        return keyed[0].identity
    keys = {leaf.primary_key for leaf in full}
    return next(iter(keys)) if len(keys) == 1 and () not in keys else None


def _is_unique(leaf: Leaf, key: tuple[str, ...]) -> bool:
    return bool(leaf.primary_key) and set(leaf.primary_key) <= set(key)
