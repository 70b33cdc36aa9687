"""Transactions that are sent while in progress: taken apart, rolled back in part, and equal to what comes at commit."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import HeadwaterError, ProtocolError
from headwater.events import EventBatch
from headwater.lsn import ZERO, CommitLsn, EndLsn
from headwater.wire import pgoutput, streamed
from headwater.wire.pgoutput import Ownership, PgOutputDecoder
from headwater.wire.relation import RelationMessage
from headwater.wire.spool import MemoryBudget, Spool
from tests.unit.wire import pgoutput_bytes as pg

ORDERS, ITEMS = pg.table(10, "orders"), pg.table(11, "items")
BY_ID = {ORDERS.id: ORDERS, ITEMS.id: ITEMS}


def own_all(relation: RelationMessage, commit_lsn: CommitLsn) -> Ownership | None:
    return Ownership(BY_ID[relation.id], ZERO)


def block(xid: int, *messages: bytes, sub: int | None = None) -> bytes:
    inside = (pg.in_progress(message, xid if sub is None else sub) for message in messages)
    return pg.stream_start(xid) + b"".join(inside) + pg.stream_stop()


def fed(*messages: bytes) -> PgOutputDecoder:
    decoder = PgOutputDecoder()
    decoder.feed(pg.as_array(b"".join(messages)))
    return decoder


def events(*batches: EventBatch | None) -> list[str]:
    """Everything of a stream that must not depend on how it was sent."""
    return [repr(event) for batch in batches if batch is not None for event in batch.events()]


def test_a_transaction_in_progress_takes_its_place_where_it_commits() -> None:
    big = [pg.relation(ORDERS), pg.insert(10, pg.row(1)), pg.insert(10, pg.row(2))]
    small = [pg.begin(100, xid=8), pg.relation(ORDERS), pg.insert(10, pg.row(3)), pg.commit(100, 110)]
    last = [pg.begin(300, xid=9), pg.insert(10, pg.row(5)), pg.commit(300, 310)]
    streamed = fed(
        block(7, *big), *small, block(7, pg.update(10, pg.row(4), old_key=[b"\0\0\0\1", None])),
        pg.stream_commit(7, 200, 210), *last,
    ).seal(own_all)  # fmt: skip
    at_once = fed(
        *small, pg.begin(200, xid=7), *big, pg.update(10, pg.row(4), old_key=[b"\0\0\0\1", None]),
        pg.commit(200, 210), *last,
    ).seal(own_all)  # fmt: skip
    assert events(streamed) == events(at_once)
    assert streamed is not None
    assert streamed.end_lsn == EndLsn(310)


def test_what_was_rolled_back_is_dropped_and_ordinals_count_the_rest() -> None:
    changes = fed(
        block(7, pg.relation(ORDERS), pg.insert(10, pg.row(1))),
        block(7, pg.insert(10, pg.row(2)), sub=8),
        block(7, pg.insert(10, pg.row(3)), sub=9),
        pg.stream_abort(7, 9),
        pg.stream_abort(7, 8),
        block(7, pg.relation(ORDERS), pg.insert(10, pg.row(4))),
        pg.stream_commit(7, 200, 210),
    ).seal(own_all)
    at_once = fed(
        pg.begin(200, xid=7), pg.relation(ORDERS), pg.insert(10, pg.row(1)), pg.insert(10, pg.row(4)),
        pg.commit(200, 210),
    ).seal(own_all)  # fmt: skip
    assert events(changes) == events(at_once)


def test_a_transaction_that_is_rolled_back_as_a_whole_leaves_nothing() -> None:
    decoder = fed(block(7, pg.relation(ORDERS), pg.insert(10, pg.row(1))), pg.stream_abort(7), pg.keepalive(500))
    assert not decoder.has_transactions
    assert decoder.buffered_bytes == 0
    assert decoder.idle_position == EndLsn(500)
    # Its RELATION went with it: the server sends it again.
    decoder.feed(pg.as_array(pg.begin(600) + pg.insert(10, pg.row(1)) + pg.commit(600, 610)))
    with pytest.raises(ProtocolError, match="before its RELATION"):
        decoder.seal(own_all)


@pytest.mark.invariant(9)
def test_a_transaction_in_progress_does_not_hold_the_idle_position() -> None:
    decoder = fed(block(7, pg.relation(ORDERS), pg.insert(10, pg.row(1))), pg.keepalive(500))
    assert decoder.idle_position == EndLsn(500)
    decoder.feed(pg.as_array(pg.stream_commit(7, 600, 610)))
    assert decoder.idle_position is None


def test_a_batch_is_cut_while_a_block_is_open() -> None:
    decoder = fed(
        pg.begin(100), pg.relation(ORDERS), pg.insert(10, pg.row(1)), pg.commit(100, 110), pg.keepalive(120),
        pg.stream_start(7), pg.in_progress(pg.relation(ORDERS), 7), pg.in_progress(pg.insert(10, pg.row(2)), 7),
    )  # fmt: skip
    first = decoder.seal(own_all)
    decoder.feed(pg.as_array(pg.in_progress(pg.insert(10, pg.row(3)), 7) + pg.stream_stop()))
    decoder.feed(pg.as_array(pg.stream_commit(7, 200, 210)))
    second = decoder.seal(own_all)
    assert first is not None
    assert second is not None
    small = [pg.begin(100), pg.relation(ORDERS), pg.insert(10, pg.row(1)), pg.commit(100, 110)]
    large = [pg.begin(200, xid=7), pg.insert(10, pg.row(2)), pg.insert(10, pg.row(3)), pg.commit(200, 210)]
    assert events(first, second) == events(fed(*small, *large).seal(own_all))


@dataclass
class _Open:
    """A transaction of the model: what it did, level by level, and what of it stands."""

    xid: int
    kept: list[bytes] = field(default_factory=list)
    levels: list[tuple[int, int]] = field(default_factory=list)
    """Open subtransactions: xid, and how much was kept when each began."""


@pytest.mark.invariant(3)
@pytest.mark.invariant(4)
@given(seed=st.integers(0, 2**32), spill=st.booleans())
@settings(deadline=None, max_examples=120)
def test_the_stream_in_progress_equals_the_stream_at_commit(
    seed: int, spill: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    choose = random.Random(seed)
    sent: list[bytes] = []
    at_once: list[bytes] = []
    transactions: dict[int, _Open] = {}
    described: set[int] = set()
    next_xid, lsn, row = 2**32 - 20, 1000, 0
    for _ in range(choose.randint(5, 80)):
        action = choose.random()
        if action < 0.2 or not transactions:
            next_xid += 1
            transactions[next_xid] = _Open(next_xid)
            continue
        tx = choose.choice(list(transactions.values()))
        if action < 0.75:
            inside = []
            for _ in range(choose.randint(0, 6)):
                row += 1
                if choose.random() < 0.25:
                    next_xid += 1
                    tx.levels.append((next_xid, len(tx.kept)))
                elif choose.random() < 0.2 and tx.levels:
                    # A savepoint that is released: from now on its changes are its parent's, under its own xid.
                    tx.levels.pop()
                table = choose.choice((10, 11))
                messages = [pg.insert(table, pg.row(row))]
                if choose.random() < 0.1:
                    messages = [pg.truncate(10, 11)]
                # As the server does: described anew for each block here, which is more often than it has to be.
                messages = [pg.relation(ORDERS), pg.relation(ITEMS), *messages]
                xid = tx.levels[-1][0] if tx.levels else tx.xid
                tx.kept += messages
                inside += [pg.in_progress(message, xid & 0xFFFFFFFF) for message in messages]
            sent += [pg.stream_start(tx.xid & 0xFFFFFFFF), *inside, pg.stream_stop()]
        elif action < 0.85 and tx.levels:
            # Rolling back to a savepoint takes those within it along, innermost last.
            depth = choose.randrange(len(tx.levels))
            for sub, _ in tx.levels[depth:]:
                sent.append(pg.stream_abort(tx.xid & 0xFFFFFFFF, sub & 0xFFFFFFFF))
            del tx.kept[tx.levels[depth][1] :]
            del tx.levels[depth:]
        elif action < 0.9:
            lsn += 100
            small = [pg.begin(lsn, xid=5), pg.insert(10, pg.row(lsn)), pg.commit(lsn, lsn + 10)]
            small[1:1] = [] if 10 in described else [pg.relation(ORDERS)]
            described.add(10)
            sent += [*small, pg.keepalive(lsn + 20)]
            at_once += small
        else:
            del transactions[tx.xid]
            sent += [pg.stream_start(tx.xid & 0xFFFFFFFF), pg.stream_stop()]
            if choose.random() < 0.3:
                sent.append(pg.stream_abort(tx.xid & 0xFFFFFFFF))
                continue
            lsn += 100
            sent.append(pg.stream_commit(tx.xid & 0xFFFFFFFF, lsn, lsn + 10))
            at_once += [pg.begin(lsn, xid=tx.xid & 0xFFFFFFFF), *tx.kept, pg.commit(lsn, lsn + 10)]
    whole = fed(*at_once).seal(own_all)
    spool = Spool(tmp_path_factory.mktemp("spool"))
    decoder = PgOutputDecoder(spool, MemoryBudget(0)) if spill else PgOutputDecoder()
    pieces = []
    for frame in sent:
        decoder.feed(pg.as_array(frame))
        if choose.random() < 0.1:
            pieces.append(decoder.seal(own_all))
    pieces.append(decoder.seal(own_all))
    assert _without_relations(events(*pieces)) == _without_relations(events(whole))


def _without_relations(found: list[str]) -> list[str]:
    return [event for event in found if not event.startswith("Relation")]


def test_a_large_transaction_in_progress_lies_on_disk_and_so_does_the_list_of_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgoutput, "SEGMENT_BYTES", 4096)
    monkeypatch.setattr(streamed, "IN_MEMORY_BYTES", 1024)
    rows = [pg.insert(10, pg.row(i, f"name {i}" * 5)) for i in range(1000)]
    rolled_back = [pg.insert(10, pg.row(i)) for i in range(2000, 2500)]
    spool = Spool(tmp_path)
    decoder = PgOutputDecoder(spool, MemoryBudget(16384))
    for message in [pg.relation(ORDERS), *rows]:
        decoder.feed(pg.as_array(block(7, message)))
    for message in rolled_back:
        decoder.feed(pg.as_array(block(7, message, sub=9)))
    decoder.feed(pg.as_array(pg.stream_abort(7, 9)))
    decoder.feed(pg.as_array(block(7, rows[0]) + pg.stream_commit(7, 100, 120)))
    assert spool.spilled_bytes > decoder.buffered_bytes / 2
    at_once = fed(pg.begin(100, xid=7), pg.relation(ORDERS), *rows, rows[0], pg.commit(100, 120)).seal(own_all)
    assert events(decoder.seal(own_all)) == events(at_once)
    assert list(tmp_path.iterdir()) == []


MESSAGES = [
    pg.stream_start(7),
    pg.in_progress(pg.relation(ORDERS), 7),
    pg.in_progress(pg.insert(10, pg.row(1, "a")), 7),
    pg.in_progress(pg.truncate(10), 8),
    pg.keepalive(50),
    pg.stream_stop(),
    pg.stream_abort(7, 8),
    pg.stream_commit(7, 100, 120),
]
SESSION = b"".join(MESSAGES)
BOUNDARIES = set(accumulate(map(len, MESSAGES)))


@pytest.mark.parametrize("cut", sorted(set(range(1, len(SESSION))) - BOUNDARIES))
def test_a_stream_cut_at_any_byte_gives_a_protocol_error(cut: int) -> None:
    with pytest.raises(ProtocolError):
        fed(SESSION[:cut])


@given(st.binary(min_size=1, max_size=3), st.integers(0, len(SESSION) - 1))
@settings(deadline=None, max_examples=500)
def test_damaged_bytes_never_give_anything_but_our_errors(damage: bytes, at: int) -> None:
    damaged = bytearray(SESSION)
    damaged[at : at + len(damage)] = damage
    with suppress(HeadwaterError):
        fed(bytes(damaged)).seal(lambda relation, lsn: Ownership(ORDERS, ZERO))


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([pg.stream_stop()], "STREAM STOP outside a block"),
        ([pg.stream_start(7), pg.stream_start(8)], "STREAM START inside a block"),
        ([pg.stream_start(7), pg.stream_commit(7, 1, 2)], "STREAM COMMIT inside a block"),
        ([pg.stream_commit(7, 1, 2)], "never begun"),
        ([pg.begin(1), pg.stream_start(7)], "inside another one"),
        ([pg.stream_start(7), pg.begin(1)], "BEGIN inside a block"),
        ([pg.stream_start(7), pg.commit(1, 2)], "COMMIT inside a block"),
        ([pg.framed(b"S\0")], "too short"),
    ],
)
def test_messages_out_of_order_are_refused(messages: list[bytes], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        fed(*messages)
