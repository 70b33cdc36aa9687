"""The decoder of a stream: whole transactions, ordinals, relations, truncates, and damaged bytes."""

from __future__ import annotations

import random
import struct
from functools import reduce
from itertools import accumulate, groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import HeadwaterError, ProtocolError
from headwater.events import DELETE, INSERT, UNCHANGED, UPDATE, ChangeRun, Event, EventBatch, Truncate, TruncateStep
from headwater.lsn import ZERO, CommitLsn, EndLsn
from headwater.schema.table import TableId
from headwater.wire import pgoutput
from headwater.wire.pgoutput import Ownership, PgOutputDecoder
from headwater.wire.relation import RelationMessage
from headwater.wire.spool import MemoryBudget, Spool
from tests.unit.wire import pgoutput_bytes as pg

ORDERS, ITEMS = pg.table(10, "orders"), pg.table(11, "items")
BY_ID = {ORDERS.id: ORDERS, ITEMS.id: ITEMS}


def own_all(relation: RelationMessage, commit_lsn: CommitLsn) -> Ownership | None:
    return Ownership(BY_ID[relation.id], ZERO)


def decode(*messages: bytes) -> EventBatch:
    decoder = PgOutputDecoder()
    decoder.feed(pg.as_array(b"".join(messages)))
    changes = decoder.seal(own_all)
    assert changes is not None
    return changes


def only_run(changes: EventBatch, table_id: int = 10) -> ChangeRun:
    (step,) = changes.tables[TableId(table_id)]
    assert isinstance(step, ChangeRun)
    return step


def test_a_transaction_becomes_columns() -> None:
    changes = decode(
        pg.begin(100, xid=7),
        pg.relation(ORDERS),
        pg.insert(10, pg.row(1, "a")),
        pg.update(10, pg.row(2, "b"), old_key=[b"\0\0\0\1", None]),
        pg.delete(10, [b"\0\0\0\2", None]),
        pg.commit(100, 120),
    )
    run = only_run(changes)
    assert run.op.tolist() == [INSERT, UPDATE, DELETE]
    assert run.new.to_pylist() == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": None, "name": None}]
    assert run.old is not None
    assert run.old.column("id").to_pylist() == [None, 1, 2]
    assert run.ordinal.tolist() == [0, 1, 2]
    assert run.commit_lsn.tolist() == [100, 100, 100]
    assert changes.end_lsn == EndLsn(120)


@pytest.mark.invariant(4)
def test_a_batch_holds_whole_transactions_and_keeps_the_rest() -> None:
    decoder = PgOutputDecoder()
    whole = [pg.begin(100), pg.relation(ORDERS), pg.insert(10, pg.row(1)), pg.commit(100, 110)]
    part = [pg.begin(200), pg.insert(10, pg.row(2))]
    decoder.feed(pg.as_array(b"".join(whole + part)))
    changes = decoder.seal(own_all)
    assert changes is not None
    assert only_run(changes).new.column("id").to_pylist() == [1]
    assert decoder.in_transaction
    assert decoder.seal(own_all) is None
    decoder.feed(pg.as_array(pg.commit(200, 210)))
    rest = decoder.seal(own_all)
    assert rest is not None
    assert only_run(rest).new.column("id").to_pylist() == [2]
    assert rest.end_lsn == EndLsn(210)


@pytest.mark.invariant(3)
def test_ordinals_count_a_tables_messages_within_the_transaction_and_nothing_else() -> None:
    changes = decode(
        pg.begin(100),
        pg.relation(ORDERS),
        pg.insert(10, pg.row(1)),
        pg.relation(ITEMS),
        pg.insert(11, pg.row(1)),
        pg.relation(ORDERS),
        pg.insert(10, pg.row(2)),
        pg.truncate(10, 11),
        pg.insert(10, pg.row(3)),
        pg.commit(100, 120),
        pg.begin(200),
        pg.insert(10, pg.row(4)),
        pg.commit(200, 220),
    )
    before, truncate, after = changes.tables[TableId(10)]
    assert isinstance(before, ChangeRun)
    assert isinstance(truncate, TruncateStep)
    assert isinstance(after, ChangeRun)
    assert before.ordinal.tolist() == [0, 1]
    assert truncate.ordinal == 2
    assert after.ordinal.tolist() == [3, 0]
    assert after.commit_lsn.tolist() == [100, 200]


@pytest.mark.invariant(7)
def test_a_relation_without_a_difference_splits_nothing() -> None:
    again = [pg.relation(ORDERS), pg.insert(10, pg.row(2))]
    changes = decode(pg.begin(1), pg.relation(ORDERS), pg.insert(10, pg.row(1)), *again, pg.commit(1, 2))
    assert len(only_run(changes)) == 2


@pytest.mark.invariant(12)
def test_unchanged_values_are_marked_and_are_not_null() -> None:
    changes = decode(pg.begin(1), pg.relation(ORDERS), pg.update(10, [b"\0\0\0\1", "unchanged"]), pg.commit(1, 2))
    run = only_run(changes)
    assert run.unchanged["name"].tolist() == [True]
    events = [event for event in changes.events() if hasattr(event, "new")]
    assert events[0].new == (1, UNCHANGED)


def test_changes_before_the_owners_position_are_dropped() -> None:
    decoder = PgOutputDecoder()
    for lsn in (100, 200, 300):
        head = [pg.relation(ORDERS)] if lsn == 100 else []
        decoder.feed(
            pg.as_array(b"".join([pg.begin(lsn), *head, pg.insert(10, pg.row(lsn)), pg.commit(lsn, lsn + 10)]))
        )
    changes = decoder.seal(lambda relation, lsn: Ownership(ORDERS, EndLsn(200)))
    assert changes is not None
    assert only_run(changes).new.column("id").to_pylist() == [200, 300]


@pytest.mark.invariant(7)
def test_relation_is_remembered_for_tables_that_no_worker_owns() -> None:
    decoder = PgOutputDecoder()
    first = [pg.begin(1), pg.relation(ORDERS), pg.insert(10, pg.row(1)), pg.commit(1, 2)]
    decoder.feed(pg.as_array(b"".join(first)))
    dropped = decoder.seal(lambda relation, lsn: None)
    assert dropped is not None
    assert not dropped.tables
    decoder.feed(pg.as_array(b"".join([pg.begin(3), pg.insert(10, pg.row(2)), pg.commit(3, 4)])))
    changes = decoder.seal(own_all)
    assert changes is not None
    assert only_run(changes).new.column("id").to_pylist() == [2]


@pytest.mark.invariant(9)
def test_the_idle_position_stands_only_when_nothing_waits() -> None:
    decoder = PgOutputDecoder()

    def after(data: bytes) -> EndLsn | None:
        decoder.feed(pg.as_array(data))
        return decoder.idle_position

    assert after(pg.keepalive(50)) == EndLsn(50)
    assert after(pg.begin(60) + pg.relation(ORDERS) + pg.keepalive(70)) is None
    assert after(pg.commit(60, 80) + pg.keepalive(90)) is None
    decoder.seal(own_all)
    assert decoder.idle_position == EndLsn(90)


def test_how_far_the_stream_is_whole_is_known_from_commits_and_keepalives() -> None:
    decoder = PgOutputDecoder()
    assert decoder.whole_until == ZERO
    decoder.feed(pg.as_array(pg.keepalive(50) + pg.begin(60)))
    assert decoder.whole_until == EndLsn(50)
    decoder.feed(pg.as_array(pg.relation(ORDERS) + pg.keepalive(70)))
    assert decoder.whole_until == EndLsn(50)  # an open transaction: what the server has read says nothing of it
    decoder.feed(pg.as_array(pg.commit(60, 80)))
    assert decoder.whole_until == EndLsn(80)
    decoder.feed(pg.as_array(pg.keepalive(90)))
    assert decoder.whole_until == EndLsn(90)


@pytest.mark.invariant(9)
def test_transactions_without_a_change_are_a_position_and_nothing_else() -> None:
    message = pg.framed(b"M" + struct.pack("!BQ", 1, 40) + b"headwater\0" + struct.pack("!I", 0))
    changes = decode(pg.begin(40), pg.commit(40, 50), pg.begin(60), message, pg.commit(60, 70))
    assert changes.tables == {}
    assert changes.end_lsn == EndLsn(70)


@pytest.mark.invariant(3)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_the_sequence_key_does_not_depend_on_how_the_stream_is_cut(sizes: list[int], seed: int) -> None:
    frames, choose = _frames(sizes, seed), random.Random(seed)
    assert _keys(_in_pieces(frames, choose)) == _keys([decode(*frames)])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_batches_put_together_are_the_batch_that_was_never_cut(sizes: list[int], seed: int) -> None:
    frames, choose = _frames(sizes, seed), random.Random(seed)
    first, *later = _in_pieces(frames, choose)
    together = reduce(EventBatch.then, later, first)
    whole = decode(*frames)
    assert _in_order(together) == _in_order(whole)
    assert (together.end_lsn, together.size_bytes) == (whole.end_lsn, whole.size_bytes)
    # As few runs as if they had come at once: each is a write of its own.
    assert {t: len(steps) for t, steps in together.tables.items()} == {t: len(s) for t, s in whole.tables.items()}


def _in_order(batch: EventBatch) -> list[Event]:
    """One message truncates several tables: among those there is no order."""
    events = list[Event]()
    for kind, found in groupby(batch.events(), type):
        alike = list(found)
        events += sorted(alike, key=lambda event: event.schema.id) if kind is Truncate else alike  # type: ignore[union-attr]
    return events


def _frames(sizes: list[int], seed: int) -> list[bytes]:
    choose = random.Random(seed)
    frames = [pg.begin(1), pg.relation(ORDERS), pg.relation(ITEMS), pg.commit(1, 2)]
    for number, size in enumerate(sizes):
        lsn = 100 + 10 * number
        frames.append(pg.begin(lsn))
        for i in range(size):
            table = choose.choice((10, 11))
            frames.append(
                pg.truncate(10, 11) if choose.random() < 0.05 else pg.insert(table, pg.row(1000 * number + i))
            )
            if choose.random() < 0.1:
                frames.append(pg.relation(BY_ID[TableId(table)]))
        frames.append(pg.commit(lsn, lsn + 5))
    return frames


def _in_pieces(frames: list[bytes], choose: random.Random) -> list[EventBatch]:
    """Sealed here and there."""
    pieces, decoder = [], PgOutputDecoder()
    for frame in frames:
        decoder.feed(pg.as_array(frame))
        if choose.random() < 0.2:
            pieces.append(decoder.seal(own_all))
    pieces.append(decoder.seal(own_all))
    return [piece for piece in pieces if piece is not None]


def _keys(batches: list[EventBatch]) -> list[tuple[int, int, int, object]]:
    keys = []
    for changes in batches:
        for table, steps in changes.tables.items():
            for step in steps:
                if isinstance(step, TruncateStep):
                    keys.append((table, step.commit_lsn.value, step.ordinal, "truncate"))
                    continue
                ids = step.new.column("id").to_pylist()
                keys += [(table, int(c), int(o), i) for c, o, i in zip(step.commit_lsn, step.ordinal, ids, strict=True)]
    return sorted(keys, key=lambda key: key[:3])


MESSAGES = [
    pg.begin(100),
    pg.relation(ORDERS),
    pg.insert(10, pg.row(1, "a")),
    pg.update(10, pg.row(2, None), old_key=[b"\0\0\0\1", None]),
    pg.truncate(10, 11),
    pg.relation(ITEMS),
    pg.delete(10, [b"\0\0\0\2", None]),
    pg.commit(100, 120),
    pg.keepalive(130),
]
SESSION = b"".join(MESSAGES)
BOUNDARIES = set(accumulate(map(len, MESSAGES)))


@pytest.mark.parametrize("cut", range(1, len(SESSION)))
def test_a_stream_cut_at_any_byte_gives_a_protocol_error(cut: int) -> None:
    decoder = PgOutputDecoder()
    if cut in BOUNDARIES:
        decoder.feed(pg.as_array(SESSION[:cut]))
        return
    with pytest.raises(ProtocolError) as caught:
        decoder.feed(pg.as_array(SESSION[:cut]))
    assert 0 <= caught.value.offset <= cut


@given(st.binary(min_size=1, max_size=3), st.integers(0, len(SESSION) - 1))
@settings(deadline=None, max_examples=500)
def test_damaged_bytes_never_give_anything_but_our_errors(damage: bytes, at: int) -> None:
    damaged = bytearray(SESSION)
    damaged[at : at + len(damage)] = damage
    decoder = PgOutputDecoder()
    try:
        decoder.feed(pg.as_array(bytes(damaged)))
        decoder.seal(lambda relation, lsn: Ownership(ORDERS, ZERO))
    except HeadwaterError:
        pass


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([pg.insert(10, pg.row(1))], "change outside a transaction"),
        ([pg.begin(1), pg.begin(2)], "BEGIN inside a transaction"),
        ([pg.commit(1, 2)], "COMMIT outside a transaction"),
        ([pg.begin(1), pg.commit(2, 3)], "COMMIT does not match its BEGIN"),
        ([pg.framed(b"?xx")], "unknown kind of message"),
    ],
)
def test_messages_out_of_order_are_refused(messages: list[bytes], complaint: str) -> None:
    decoder = PgOutputDecoder()
    with pytest.raises(ProtocolError, match=complaint):
        decoder.feed(pg.as_array(b"".join(messages)))


def test_a_change_before_its_relation_is_refused() -> None:
    decoder = PgOutputDecoder()
    decoder.feed(pg.as_array(pg.begin(1) + pg.insert(10, pg.row(1)) + pg.commit(1, 2)))
    with pytest.raises(ProtocolError, match="before its RELATION"):
        decoder.seal(own_all)


def test_a_transaction_larger_than_the_budget_goes_to_disk_and_is_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgoutput, "SEGMENT_BYTES", 4096)
    rows = [pg.insert(10, pg.row(i, f"name {i}" * 5)) for i in range(1000)]
    rows += [pg.update(10, pg.row(i, "x"), old_key=[b"\0\0\0\1", None]) for i in range(1000, 1100)]
    frames = [pg.begin(100), pg.relation(ORDERS), *rows, pg.commit(100, 120)]
    spool = Spool(tmp_path)
    decoder = PgOutputDecoder(spool, MemoryBudget(16384))
    for frame in frames:
        decoder.feed(pg.as_array(frame))
    assert spool.spilled_bytes > decoder.buffered_bytes / 2
    spilled = decoder.seal(own_all)
    assert spilled is not None
    there, here = only_run(spilled), only_run(decode(*frames))
    assert there.new.equals(here.new)
    assert there.old is not None
    assert here.old is not None
    assert there.old.equals(here.old)
    assert there.ordinal.tolist() == here.ordinal.tolist() == list(range(1100))
    assert list(tmp_path.iterdir()) == []
