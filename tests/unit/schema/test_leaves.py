"""What the leaves of a published root have in common."""

from __future__ import annotations

import pytest

from headwater.schema.leaves import Leaf, LeafIdentity, NoCommonIdentity, common_identity

ID_AT = ("id", "at")
FULL = None
BY_AT = [("at",)]


def leaf(identity: tuple[str, ...] | None, primary_key: tuple[str, ...] = (), name: str = "p1") -> Leaf:
    return Leaf(name, identity, primary_key)


@pytest.mark.invariant(13)
@pytest.mark.parametrize(
    ("root_key", "leaves", "expected"),
    [
        (ID_AT, [], LeafIdentity(ID_AT)),
        (ID_AT, [leaf(ID_AT, ID_AT), leaf(FULL, ID_AT)], LeafIdentity(ID_AT)),
        (ID_AT, [leaf(FULL, ID_AT)], LeafIdentity(ID_AT, old_is_full=True)),
        (ID_AT, [leaf(ID_AT, ID_AT), leaf((), ID_AT)], LeafIdentity(ID_AT)),
        ((), [leaf(ID_AT, ID_AT), leaf(ID_AT, ID_AT)], LeafIdentity(ID_AT)),
        ((), [leaf(("other", "at"), ID_AT)] * 2, LeafIdentity(("other", "at"))),
        ((), [leaf(("id",), ("id",))] * 2, LeafIdentity(("id",), strict_inserts=True)),
        ((), [leaf(FULL), leaf(FULL)], LeafIdentity((), old_is_full=True)),
        ((), [leaf(FULL, ID_AT), leaf(FULL, ("id",))], LeafIdentity((), old_is_full=True)),
        ((), [leaf(()), leaf(())], LeafIdentity()),
    ],
)
def test_the_key_is_what_every_leaf_carries_and_what_names_a_row(
    root_key: tuple[str, ...], leaves: list[Leaf], expected: LeafIdentity
) -> None:
    assert common_identity(root_key, leaves, BY_AT) == expected


@pytest.mark.parametrize(
    "leaves",
    [
        [leaf(ID_AT, ID_AT), leaf(("other", "at"), ID_AT, "odd")],
        [leaf(ID_AT, ID_AT), leaf(FULL, (), "odd")],
        [leaf(ID_AT, ID_AT), leaf((), (), "odd")],
        [leaf(FULL), leaf((), (), "odd")],
    ],
)
def test_leaves_without_a_common_identity_are_refused_and_the_odd_one_is_named(leaves: list[Leaf]) -> None:
    with pytest.raises(NoCommonIdentity) as caught:
        common_identity((), leaves, BY_AT)
    assert caught.value.leaf == "odd"


def test_a_key_must_have_the_partition_key_of_every_level_and_an_expression_is_in_none() -> None:
    leaves = [leaf(ID_AT, ID_AT)] * 2
    assert not common_identity((), leaves, [("at",), ("id",)]).strict_inserts
    assert common_identity((), leaves, [("at",), ("region",)]).strict_inserts
    assert common_identity((), leaves, [("at",), ("",)]).strict_inserts


@pytest.mark.parametrize(
    ("common", "kind", "flagged", "carried"),
    [
        (LeafIdentity(ID_AT), "d", ID_AT, True),
        (LeafIdentity(ID_AT), "f", ("id", "at", "note"), True),
        (LeafIdentity(ID_AT), "i", ("other",), False),
        (LeafIdentity(ID_AT), "n", (), True),
        (LeafIdentity(ID_AT), "d", (), False),
        (LeafIdentity((), old_is_full=True), "d", ID_AT, False),
        (LeafIdentity((), old_is_full=True), "f", ID_AT, True),
        (LeafIdentity(), "d", ID_AT, False),
        (LeafIdentity(), "d", (), True),
    ],
)
def test_a_leaf_that_the_stream_describes_carries_what_the_copy_relies_on_or_not(
    common: LeafIdentity, kind: str, flagged: tuple[str, ...], carried: bool
) -> None:
    assert common.is_carried_by(kind, flagged) is carried
