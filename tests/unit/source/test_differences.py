"""What a difference between two fingerprints means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.source.differences import ToldTruncates, differences, gone_leaves, taken_over, unexplained
from headwater.source.fingerprint import (
    VERSION,
    ColumnFacts,
    Fingerprint,
    IdentityFacts,
    PartFacts,
    PublicationFacts,
    StorageFacts,
    UnseenLeaf,
    from_text,
    to_text,
)

KEY = IdentityFacts("d", ("id",), 900, ())
STORAGE = StorageFacts(500, 501, 700, "p")
ORDERS = Fingerprint(
    table_id=TableId(500),
    namespace="public",
    name="orders",
    kind="r",
    publication=PublicationFacts(10, "600", 10, "iudt", True, "n", "(0,3)", "(0,5)"),
    ties=("table:11@601",),
    row_filter="",
    column_list=None,
    columns=(ColumnFacts(1, "id", 23, -1, "", ""), ColumnFacts(2, "note", 25, -1, "", "")),
    identity=KEY,
    storage=STORAGE,
    types={
        "20000": {"kind": "e", "base": [0, -1, 0], "labels": {"1": ["new", "700"]}, "attributes": None, "subtype": None}
    },
)


def part(oid: int, changed_by: int = 700, relfilenode: int | None = None, *, born: bool = True) -> PartFacts:
    storage = StorageFacts(relfilenode if relfilenode is not None else oid, 0, changed_by, "p")
    return PartFacts(oid, f"p{oid}", "r", f":500@{oid}", born, KEY, storage, ())


ROOT = replace(ORDERS, kind="p", storage=StorageFacts(0, 0, 700, "p"), partition_key=("id",), parts=(part(1), part(2)))


def reasons(before: Fingerprint, now: Fingerprint) -> str:
    return "; ".join(difference.reason for difference in differences(before, now))


def test_a_fingerprint_comes_back_from_its_text_and_one_of_another_version_does_not() -> None:
    assert from_text(to_text(ROOT)) == ROOT
    assert from_text(to_text(ROOT).replace(f'"version":{VERSION}', '"version":1')) is None
    assert from_text("") is None
    assert from_text("{}") is None


@pytest.mark.invariant(17)
@pytest.mark.parametrize(
    "now",
    [
        replace(
            ORDERS, publication=replace(ORDERS.publication, version="650", owner=11, place="(0,6)", last_place="(0,6)")
        ),
        replace(ORDERS, storage=replace(STORAGE, relfilenode=999, changed_by=800)),
        replace(ORDERS, storage=replace(STORAGE, changed_by=800)),
        replace(ORDERS, identity=replace(KEY, primary_key_oid=901)),
        replace(ORDERS, ties=(*ORDERS.ties, "schema:12@602@1")),
        replace(
            ORDERS, types={"20000": {**ORDERS.types["20000"], "labels": {"1": ["new", "700"], "2": ["added", "701"]}}}
        ),
    ],
    ids=["owner of the publication", "vacuum full", "grant", "primary key made again", "one tie more", "label added"],
)
def test_what_is_provably_harmless_is_no_difference(now: Fingerprint) -> None:
    assert differences(ORDERS, now) == []


@pytest.mark.invariant(17)
@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (replace(ORDERS, name="sold"), "renamed"),
        (replace(ORDERS, publication=replace(ORDERS.publication, version="650")), "RENAME or SET"),
        (
            replace(ORDERS, publication=replace(ORDERS.publication, version="650", owner=11, place="(0,8)")),
            "RENAME or SET",
        ),
        (replace(ORDERS, publication=replace(ORDERS.publication, operations="iu")), "options"),
        (replace(ORDERS, publication=replace(ORDERS.publication, oid=12)), "dropped and created"),
        (replace(ORDERS, ties=("table:15@610",)), "added again"),
        (replace(ORDERS, row_filter="abc"), "row filter"),
        (replace(ORDERS, column_list=(1,)), "column list"),
        (replace(ORDERS, storage=replace(STORAGE, relfilenode=9, toast=10)), "rewritten"),
        (replace(ORDERS, columns=(ORDERS.columns[0], ColumnFacts(3, "note", 25, -1, "", ""))), '"note" was added'),
        (replace(ORDERS, identity=replace(KEY, kind="f")), "replica identity"),
        (replace(ORDERS, types={"20000": {**ORDERS.types["20000"], "labels": {"1": ["old", "701"]}}}), "label"),
        (replace(ORDERS, types={"20000": {**ORDERS.types["20000"], "labels": {"1": ["new", "702"]}}}), "label"),
        (replace(ORDERS, types={"20000": {**ORDERS.types["20000"], "attributes": [[1, 23, -1]]}}), "altered"),
    ],
)
def test_what_the_stream_does_not_tell_is_a_reason_to_copy_again(now: Fingerprint, reason: str) -> None:
    assert reason in reasons(ORDERS, now)


def test_another_expression_of_a_generated_column_that_is_sent_is_a_reason() -> None:
    sent = replace(ORDERS.publication, generated="s")
    made, other = (
        replace(ORDERS, publication=sent, columns=(ORDERS.columns[0], ColumnFacts(2, "note", 25, -1, "s", expression)))
        for expression in ("a", "b")
    )
    assert "expression" in reasons(made, other)
    unsent = [replace(table, publication=ORDERS.publication) for table in (made, other)]
    assert differences(*unsent) == []


def test_with_identity_full_a_primary_key_that_was_dropped_meanwhile_is_a_reason_and_one_more_tie_with_a_row_filter_too() -> (
    None
):
    full = replace(ORDERS, identity=replace(KEY, kind="f"))
    assert "primary key" in reasons(full, replace(full, identity=replace(full.identity, primary_key_oid=901)))
    limited = replace(ORDERS, row_filter="abc")
    assert "names it in another way" in reasons(limited, replace(limited, ties=(*limited.ties, "schema:12@602@1")))


def test_without_a_toast_relation_a_new_file_is_in_doubt_unless_the_stream_brought_that_truncate() -> None:
    small = replace(ORDERS, storage=replace(STORAGE, toast=0))
    now = replace(small, storage=replace(small.storage, relfilenode=999, changed_by=800))
    found = differences(small, now)
    assert found
    assert unexplained(found, ToldTruncates()) == found
    assert unexplained(found, ToldTruncates([801])) == found
    assert unexplained(found, ToldTruncates([800])) == []
    altered = replace(small, storage=replace(now.storage, columns="others"))
    assert unexplained(differences(small, altered), ToldTruncates([800]))


def test_a_toast_relation_that_came_with_a_column_which_is_gone_again_does_not_hide_a_rewrite() -> None:
    small = replace(ORDERS, storage=replace(STORAGE, toast=0))
    assert "rewritten" in reasons(small, replace(small, storage=replace(STORAGE, relfilenode=999)))


@pytest.mark.parametrize(
    ("kind", "ties", "needs"),
    [
        ("p", ("schema:12@602@1",), True),
        ("r", ("schema:12@602@1:500@9",), True),
        ("r", ("schema:12@602@1",), False),
        ("p", ("table:11@601",), False),
        ("p", ("all:10",), False),
    ],
)
def test_what_is_published_by_the_namespace_of_a_table_above_it_needs_a_stream_that_began_after_the_copy(
    kind: str, ties: tuple[str, ...], needs: bool
) -> None:
    table = replace(ORDERS, kind=kind, ties=ties)
    assert table.needs_fresh_stream(180006) is needs
    assert table.needs_fresh_stream(140023)


def test_a_partition_that_had_changes_and_does_not_show_behind_them_is_gone_and_stays_on_record_until_then() -> None:
    told = replace(ROOT, unseen=(UnseenLeaf(3, "p3", 100),), copied_at=50)
    assert gone_leaves(told, ROOT, EndLsn(100)) == []
    assert "p3" in gone_leaves(told, ROOT, EndLsn(101))[0].reason
    shows = replace(ROOT, parts=(*ROOT.parts, part(3)))
    assert gone_leaves(told, shows, EndLsn(101)) == []
    assert taken_over(told, ROOT).unseen == told.unseen
    assert taken_over(told, shows).unseen == ()
    assert taken_over(told, shows).copied_at == 50
    assert from_text(to_text(told)) == told


def test_a_truncate_of_the_root_explains_all_leaves_and_one_of_a_leaf_is_in_doubt() -> None:
    everything = replace(ROOT, parts=(part(1, 800, 91), part(2, 800, 92)))
    one = replace(ROOT, parts=(part(1, 800, 91), part(2)))
    later = replace(ROOT, parts=(part(1, 805, 93), part(2, 800, 92)))
    in_savepoint = replace(ROOT, parts=(part(1, 802, 91), part(2, 802, 92)))
    told = ToldTruncates([800])
    assert not unexplained(differences(ROOT, everything), told)
    # Or both leaves were truncated by themselves, later: their transaction looks like a savepoint of the root's.
    assert unexplained(differences(ROOT, in_savepoint), told)
    assert unexplained(differences(ROOT, one), ToldTruncates())
    assert [d.reason for d in unexplained(differences(ROOT, later), told)] == [
        'the storage of partition "p1" was replaced (TRUNCATE or VACUUM FULL)'
    ]


def test_a_partition_that_is_born_needs_nothing_and_one_that_is_attached_or_left_is_a_reason() -> None:
    assert differences(ROOT, replace(ROOT, parts=(*ROOT.parts, part(3)))) == []
    assert "attached" in reasons(ROOT, replace(ROOT, parts=(*ROOT.parts, part(3, born=False))))
    assert "truncated" in reasons(ROOT, replace(ROOT, parts=(*ROOT.parts, part(3, relfilenode=77))))
    assert "detached or dropped" in reasons(ROOT, replace(ROOT, parts=ROOT.parts[:1]))
    again = replace(ROOT.parts[0], attached=":500@9")
    assert "attached again" in reasons(ROOT, replace(ROOT, parts=(again, ROOT.parts[1])))
    other = replace(part(3), identity=IdentityFacts("i", ("id",), 900, ("other",)))
    assert "in common" in reasons(ROOT, replace(ROOT, parts=(*ROOT.parts, other)))
