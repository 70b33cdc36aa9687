"""The net of a run of changes equals playing the changes one by one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.destinations.iceberg import parts as parts_module
from headwater.destinations.iceberg.net import NetChanges, net_changes
from headwater.destinations.iceberg.net_delta import net_delta
from headwater.destinations.iceberg.parts import by_key, delta_in_parts, net_in_parts
from headwater.events import DELETE, INSERT, NO_OLD, OLD_FULL, OLD_KEY, UPDATE, ChangeRun
from headwater.schema.table import ColumnSchema, ReplicaIdentity, ReplicatedTableSchema, TableId, TableName, TableSchema
from headwater.schema.types import BUILT_IN
from headwater.wire.spool import Spool

MISSING = "<missing>"
COLUMNS = ("k", "j", "v", "w")
TYPES = pa.schema([("k", pa.int64()), ("j", pa.string()), ("v", pa.string()), ("w", pa.int64())])
SCHEMA = ReplicatedTableSchema(
    TableSchema(
        TableId(1),
        TableName("public", "t"),
        tuple(
            ColumnSchema(name, BUILT_IN[oid], primary_key=name in "kj")
            for name, oid in zip(COLUMNS, (20, 25, 25, 20), strict=True)
        ),
    )
)
Change = tuple[int, tuple[Any, ...] | None, tuple[Any, ...] | None, int, frozenset[str]]


def make_run(changes: list[Change], schema: ReplicatedTableSchema = SCHEMA) -> ChangeRun:
    """Each change: operation, new row, old row, kind of the old row, names of unchanged columns."""
    size = len(changes)
    none = (None,) * len(COLUMNS)
    new = [dict(zip(COLUMNS, c[1] or none, strict=True)) for c in changes]
    old = [dict(zip(COLUMNS, c[2] or none, strict=True)) for c in changes]
    unchanged = {
        name: np.array([name in c[4] for c in changes]) for name in COLUMNS if any(name in c[4] for c in changes)
    }
    for row, change in zip(new, changes, strict=True):
        row.update(dict.fromkeys(change[4]))
    return ChangeRun(
        schema=schema,
        op=np.array([c[0] for c in changes], np.uint8),
        commit_lsn=np.arange(size, dtype=np.uint64),
        ordinal=np.zeros(size, np.int64),
        transaction=np.zeros(size, np.int64),
        position=np.arange(size),
        new=pa.Table.from_pylist(new, TYPES),
        old_kind=np.array([c[3] for c in changes], np.uint8),
        old=pa.Table.from_pylist(old, TYPES) if any(c[3] for c in changes) else None,
        unchanged=unchanged,
    )


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[Any, Any], list[Change], bool]:
    """A target, and changes that a source holding it could send."""
    keys = st.tuples(st.integers(0, 3), st.sampled_from("ab"))
    target = {key: (*key, f"v{i}", i) for i, key in enumerate(draw(st.lists(keys, unique=True)))}
    full = draw(st.booleans())
    source = dict(target)
    changes: list[Change] = []
    for i in range(draw(st.integers(1, 14))):
        kinds = ["insert"] + (["update", "move", "delete"] if source else [])
        kind = draw(st.sampled_from(kinds))
        if kind == "insert":
            key = draw(keys)
            row = (*key, f"i{i}", 100 + i)
            source[key] = row
            changes.append((INSERT, row, None, NO_OLD, frozenset()))
            continue
        key = draw(st.sampled_from(sorted(source)))
        before = source.pop(key)
        if kind == "delete":
            changes.append(
                (DELETE, None, before if full else (*key, None, None), OLD_FULL if full else OLD_KEY, frozenset())
            )
            continue
        free = [k for k in ((a, b) for a in range(4) for b in "ab") if k not in source and k != key]
        new_key = draw(st.sampled_from(free)) if kind == "move" and free else key
        same = draw(st.sets(st.sampled_from(["v", "w"])))
        row = (*new_key, before[2] if "v" in same else f"u{i}", before[3] if "w" in same else 200 + i)
        source[new_key] = row
        old_kind = OLD_FULL if full else OLD_KEY if new_key != key else NO_OLD
        old = before if full else (*key, None, None) if old_kind else None
        changes.append((UPDATE, row, old, old_kind, frozenset(same)))
    return target, changes, full


def apply(target: dict[Any, Any], net: NetChanges) -> dict[Any, Any]:
    result = dict(target)
    upserts = [list(row.values()) for row in net.upserts.to_pylist()]
    if net.pending is not None:
        for at, origin, in_target in zip(
            net.pending.rows, net.pending.origin.to_pylist(), net.pending.in_target, strict=True
        ):
            index = int(np.flatnonzero(net.pending.rows == at)[0])
            for name, flags in net.pending.missing.items():
                if flags[index]:
                    assert in_target
                    upserts[at][COLUMNS.index(name)] = target[tuple(origin.values())][COLUMNS.index(name)]
    for key in net.deletes.to_pylist():
        result.pop(tuple(key.values()), None)
    for row in upserts:
        result[tuple(row[:2])] = tuple(row)
    return result


@settings(max_examples=400, deadline=None)
@given(histories())
def test_the_net_of_a_run_equals_playing_its_changes_one_by_one(
    history: tuple[dict[Any, Any], list[Change], bool],
) -> None:
    target, changes, full = history
    expected = dict(target)
    for op, new, old, _, _ in changes:
        if old is not None:
            expected.pop(tuple(old[:2]), None)
        if op != DELETE:
            assert new is not None
            expected[tuple(new[:2])] = new
    net = net_changes(make_run(changes), ("k", "j"))
    assert apply(target, net) == expected
    assert not full or net.pending is None
    touched = [tuple(row.values()) for row in net.deletes.to_pylist()] + [
        (row["k"], row["j"]) for row in net.upserts.to_pylist()
    ]
    assert len(touched) == len(set(touched)), "one row per key"


@settings(max_examples=300, deadline=None)
@given(histories(), st.integers(1, 5))
def test_a_large_run_taken_apart_by_key_amounts_to_the_same(
    history: tuple[dict[Any, Any], list[Change], bool], size: int
) -> None:
    target, changes, _ = history
    run, expected = make_run(changes), apply(target, net_changes(make_run(changes), ("k", "j")))
    parts = list(by_key(run, ("k", "j"), size))
    found = dict(target)
    for part in parts:
        found = apply(found, net_changes(part, ("k", "j")))
    assert found == expected
    moves = [c for c in changes if c[2] is not None and c[1] is not None and c[1][:2] != c[2][:2]]
    changes_in_parts = len(run) + len(moves)
    if any(c[4] for c in moves):
        assert len(parts) == 1
    else:
        assert len(parts) == -(-changes_in_parts // size)
        assert sum(len(part) for part in parts) == changes_in_parts


def test_a_large_run_is_netted_part_by_part_and_lies_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_CHANGES", 100)
    changes: list[Change] = [(INSERT, (i % 300, "a", f"v{i}", i), None, NO_OLD, frozenset()) for i in range(1000)]
    seen: list[int] = []

    def net(part: ChangeRun) -> NetChanges:
        seen.append(len(part))
        return net_changes(part, ("k", "j"))

    spool = Spool(tmp_path)
    found = net_in_parts(make_run(changes), ("k", "j"), spool, net)
    assert len(seen) == 10
    assert max(seen) < 400, "keys are spread over the parts"
    assert spool.spilled_bytes > 0
    assert apply({}, found) == apply({}, net_changes(make_run(changes), ("k", "j")))


def test_a_chain_of_key_changes_remembers_the_key_in_the_target() -> None:
    net = net_changes(
        make_run(
            [
                (UPDATE, (2, "a", None, 5), (1, "a", None, None), OLD_KEY, frozenset("v")),
                (UPDATE, (3, "a", None, 6), (2, "a", None, None), OLD_KEY, frozenset("v")),
            ]
        ),
        ("k", "j"),
    )
    assert net.pending is not None
    assert net.pending.origin.to_pylist() == [{"k": 1, "j": "a"}]
    assert net.pending.in_target.tolist() == [True]
    assert net.upserts.to_pylist() == [{"k": 3, "j": "a", "v": None, "w": 6}]
    assert sorted(row["k"] for row in net.deletes.to_pylist()) == [1, 2]


def test_an_insert_with_an_unchanged_value_asks_the_source() -> None:
    net = net_changes(make_run([(INSERT, (1, "a", None, 5), None, NO_OLD, frozenset("v"))]), ("k", "j"))
    assert net.pending is not None
    assert net.pending.in_target.tolist() == [False]


def test_where_a_row_took_its_key_is_remembered_through_what_left_the_key_alone() -> None:
    net = net_changes(
        make_run(
            [
                (INSERT, (1, "a", None, 5), None, NO_OLD, frozenset("v")),
                (UPDATE, (1, "a", None, 6), None, NO_OLD, frozenset("v")),
                (UPDATE, (9, "a", None, 6), None, NO_OLD, frozenset("v")),
                (UPDATE, (2, "a", None, 6), (1, "a", None, None), OLD_KEY, frozenset("v")),
                (UPDATE, (2, "a", None, 7), (2, "a", None, None), OLD_KEY, frozenset("v")),
                (UPDATE, (2, "a", None, 8), None, NO_OLD, frozenset("v")),
            ]
        ),
        ("k", "j"),
    )
    assert net.pending is not None
    assert net.upserts.column("k").to_pylist() == [9, 2]
    assert net.pending.arrived.tolist() == [2, 3]
    assert net.pending.last.tolist() == [2, 5]


def test_an_update_after_a_delete_in_the_run_does_not_look_into_the_target() -> None:
    net = net_changes(
        make_run(
            [
                (DELETE, None, (1, "a", None, None), OLD_KEY, frozenset()),
                (UPDATE, (1, "a", None, 6), None, NO_OLD, frozenset("v")),
            ]
        ),
        ("k", "j"),
    )
    assert net.pending is not None
    assert net.pending.in_target.tolist() == [False]


rows = st.tuples(st.integers(0, 1) | st.none(), st.sampled_from("ab"), st.none() | st.just("v"), st.none() | st.just(1))


@pytest.mark.promise("tables without a key")
@settings(max_examples=200, deadline=None)
@given(st.lists(rows, max_size=5), st.lists(st.tuples(st.sampled_from("IUD"), rows, rows), min_size=1, max_size=10))
def test_the_net_of_rows_without_a_key_is_a_difference_of_multisets_whole_and_in_parts(
    target: list[Any], wishes: list[Any]
) -> None:
    schema = ReplicatedTableSchema(
        TableSchema(TableId(1), TableName("p", "t"), SCHEMA.columns, replica_identity=ReplicaIdentity.FULL)
    )
    source, changes = list(target), []
    for kind, new, old in wishes:
        if kind != "I" and old not in source:
            continue
        if kind != "I":
            source.remove(old)
        if kind != "D":
            source.append(new)
        op = {"I": INSERT, "U": UPDATE, "D": DELETE}[kind]
        # Of a large value that did not change, the server sends the old one only.
        same = {name for name, before, now in zip(COLUMNS, old, new, strict=True) if before == now and name in "vw"}
        changes.append(
            (
                op,
                new if kind != "D" else None,
                old if kind != "I" else None,
                OLD_FULL if kind != "I" else NO_OLD,
                frozenset(same if kind == "U" else ()),
            )
        )
    if not changes:
        return
    run = make_run(changes, schema)
    with tempfile.TemporaryDirectory() as directory, patch.object(parts_module, "PART_CHANGES", 3):
        deltas = [net_delta(run), delta_in_parts(run, Spool(Path(directory)))]
    for delta in deltas:
        result = list(target)
        for row, count in zip(delta.removed.to_pylist(), delta.removed_count, strict=True):
            for _ in range(count):
                result.remove(tuple(row.values()))
        result += [tuple(row.values()) for row in delta.added.to_pylist()]
        assert sorted(result, key=repr) == sorted(source, key=repr)


def test_a_quarter_of_a_million_changes_are_one_row_for_each_key() -> None:
    size = 250_000
    random = np.random.default_rng(1)
    table = pa.table(
        {"k": random.integers(0, 100_000, size), "j": ["a"] * size, "v": [None] * size, "w": np.arange(size)}
    ).cast(TYPES)
    run = ChangeRun(
        SCHEMA,
        np.full(size, UPDATE, np.uint8),
        np.arange(size, dtype=np.uint64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.arange(size),
        table,
        np.zeros(size, np.uint8),
        None,
        {"v": np.ones(size, np.bool_)},
    )
    net = net_changes(run, ("k", "j"))
    assert net.upserts.num_rows == len(np.unique(table["k"].to_numpy()))


def test_a_key_that_is_stored_out_of_line_stays_the_key() -> None:
    """Of such a key the server sends the old one, and calls the one in the new tuple unchanged."""
    changes: list[Change] = [
        (UPDATE, (1, None, "a", 1), (1, "long 1", None, None), OLD_KEY, frozenset({"j"})),
        (UPDATE, (1, None, "b", 2), (1, "long 2", None, None), OLD_KEY, frozenset({"j"})),
    ]
    net = net_changes(make_run(changes), ("k", "j"))
    assert net.deletes.num_rows == 0
    assert net.pending is None
    rows = sorted(net.upserts.to_pylist(), key=lambda row: row["v"])
    assert rows == [{"k": 1, "j": "long 1", "v": "a", "w": 1}, {"k": 1, "j": "long 2", "v": "b", "w": 2}]
