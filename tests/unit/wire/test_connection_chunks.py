"""The inbox cuts bytes into whole messages, whatever the pieces they come in."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from headwater.errors import ProtocolError
from headwater.wire import messages
from headwater.wire.chunks import MALFORMED, MORE, OTHER, Inbox, split


class Pieces:
    """A byte source that gives what it was told to, piece by piece."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def receive_into(self, view: memoryview) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        count = min(len(piece), len(view))
        view[:count] = piece[:count]
        if count < len(piece):
            self._pieces.insert(0, piece[count:])
        return count


def data(payload: bytes) -> bytes:
    return messages.frame(b"d", payload)


def cut(stream: bytes, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    pieces = []
    while stream:
        size = chance.choice((1, 3, 7, 100, 5000, 70_000))
        pieces.append(stream[:size])
        stream = stream[size:]
    return pieces


def drain(inbox: Inbox, chunk_bytes: int) -> bytes:
    """As a reader does: receive until dry or full, then take."""
    out = []
    while True:
        inbox.split_copy_data()
        if inbox.whole_bytes and (inbox.whole_bytes >= chunk_bytes or inbox.is_full):
            out.append(inbox.take_chunk().data)
        elif inbox.receive() == 0:
            break
    if inbox.whole_bytes:
        out.append(inbox.take_chunk().data)
    # Only now: a chunk whose memory had been written to again would show.
    return b"".join(part.tobytes() for part in out)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_hold_every_byte_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    stream = b"".join(data(chance.randbytes(chance.choice((0, 1, 30, 200, 9_000, 150_000)))) for _ in range(200))
    inbox = Inbox(Pieces(cut(stream, seed)))
    inbox.reserve(chance.choice((1, 100_000, 1 << 20)))
    assert drain(inbox, 100_000) == stream


def test_a_chunk_ends_with_a_whole_message() -> None:
    stream = data(b"one") + data(b"two")
    inbox = Inbox(Pieces([stream + data(b"three")[:-1]]))
    inbox.receive()
    inbox.split_copy_data()
    assert inbox.take_chunk().data.tobytes() == stream
    assert inbox.whole_bytes == 0


def test_a_message_larger_than_the_buffer_arrives_whole() -> None:
    large = data(bytes(range(256)) * 20_000)
    inbox = Inbox(Pieces(cut(data(b"before") + large + data(b"after"), 1)))
    assert drain(inbox, 1 << 16) == data(b"before") + large + data(b"after")


@pytest.mark.parametrize("kind", [b"d", b"D"])
def test_security_a_header_alone_takes_no_memory_for_what_it_announces(kind: bytes) -> None:
    announced = kind + (1 << 30).to_bytes(4, "big") + bytes(1000)
    inbox = Inbox(Pieces([data(b"before"), announced]))
    tracemalloc.start()
    try:
        inbox.receive()
        inbox.split_copy_data()
        inbox.take_chunk()
        while inbox.receive():
            inbox.split_copy_data()
            if kind != b"d":
                assert inbox.message() is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_other_messages_stand_between_chunks() -> None:
    notice = messages.frame(b"N", b"VNOTICE\0\0")
    inbox = Inbox(Pieces([data(b"a") + notice + data(b"b")]))
    inbox.receive()
    inbox.split_copy_data()
    assert inbox.take_chunk().data.tobytes() == data(b"a")
    assert inbox.meets_other
    message = inbox.message()
    assert message is not None
    assert message.kind == b"N"
    inbox.split_copy_data()
    assert inbox.take_chunk().data.tobytes() == data(b"b")


@pytest.mark.parametrize("length", [0, 3, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_impossible_length_is_named_with_its_offset(length: int) -> None:
    stream = data(b"fine") + b"d" + length.to_bytes(4, "big")
    inbox = Inbox(Pieces([stream]))
    inbox.receive()
    with pytest.raises(ProtocolError) as caught:
        inbox.split_copy_data()
    assert caught.value.offset == len(data(b"fine"))


def test_an_unknown_kind_is_an_error_and_not_a_wait() -> None:
    inbox = Inbox(Pieces([b"\x07"]))
    inbox.receive()
    with pytest.raises(ProtocolError, match="unknown kind"):
        inbox.message()


def test_split_says_why_it_stopped() -> None:
    def of(stream: bytes) -> tuple[int, int, int]:
        return split(np.frombuffer(bytearray(stream), np.uint8), 0, len(stream))

    whole = data(b"x")
    assert of(b"") == (0, MORE, 0)
    assert of(whole) == (6, MORE, 0)
    assert of(whole + whole[:4]) == (6, MORE, 0)
    assert of(whole + whole[:5]) == (6, MORE, 6)
    assert of(whole + b"Z") == (6, OTHER, 0)
    assert of(b"d\0\0\0\3")[:2] == (0, MALFORMED)
