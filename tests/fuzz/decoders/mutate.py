"""Damage done to bytes: what a broken or hostile server, or a defect of our own, could send. Knows nothing of what they mean."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

INTERESTING = (0, 1, 2, 4, 5, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
"""Where comparisons and signs turn."""
LARGEST_BYTES = 64 << 10
_FRAME_HEADER = 5

Mutation = Callable[[random.Random, bytearray, Sequence[bytes]], bytearray]


def mutated(dice: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to four kinds of damage. In half of all cases lengths of frames are mended, so that what lies deeper is reached."""
    result = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 2, 4))):
        result = dice.choice(_MUTATIONS)(dice, result, others)
    return bytes(result[:LARGEST_BYTES])


def _at(dice: random.Random, data: bytearray) -> int:
    return dice.randrange(len(data)) if data else 0


def _flip(dice: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    for _ in range(dice.choice((1, 1, 3))):
        if data:
            data[_at(dice, data)] ^= 1 << dice.randrange(8)
    return data


def _number(dice: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    at, size = _at(dice, data), dice.choice((1, 2, 4, 8))
    value = dice.choice((*INTERESTING, dice.randrange(1 << 32), len(data), len(data) - at)) & ((1 << 8 * size) - 1)
    if at + size <= len(data):
        data[at : at + size] = value.to_bytes(size, "big")
    return data


def _nudge(dice: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    """A length that is wrong by a little is the one that reaches over its end."""
    at = _at(dice, data)
    if at + 4 <= len(data):
        (value,) = struct.unpack_from("!I", data, at)
        struct.pack_into("!I", data, at, (value + dice.randint(-4, 4)) & 0xFFFFFFFF)
    return data


def _cut(dice: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    return data[: _at(dice, data)]


def _remove(dice: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    at = _at(dice, data)
    del data[at : at + dice.choice((1, 2, 4, 8, 30))]
    return data


def _insert(dice: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    at = _at(dice, data)
    data[at:at] = dice.randbytes(dice.choice((1, 2, 4, 30)))
    return data


def _splice(dice: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    other = dice.choice(others)
    return data[: _at(dice, data)] + other[_at(dice, bytearray(other)) :]


def frames(data: bytes) -> list[bytes]:
    """Messages of the protocol, as far as their lengths make sense; the rest is the last one."""
    found, at = [], 0
    while at + _FRAME_HEADER <= len(data):
        (length,) = struct.unpack_from("!I", data, at + 1)
        if length < 4 or at + 1 + length > len(data):
            break
        found.append(bytes(data[at : at + 1 + length]))
        at += 1 + length
    return found if at == len(data) else [*found, bytes(data[at:])]


def _shuffle_frames(dice: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    parts = frames(bytes(data))
    if parts:
        what = dice.randrange(4)
        at = dice.randrange(len(parts))
        if what == 0:
            parts.insert(dice.randrange(len(parts) + 1), parts[at])
        elif what == 1:
            parts.pop(at)
        elif what == 2:
            other = dice.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        else:
            parts.insert(at, dice.choice(frames(dice.choice(others)) or [b""]))
    return bytearray(b"".join(parts))


def _inside_a_frame(dice: random.Random, data: bytearray, others: Sequence[bytes]) -> bytearray:
    """Damage behind one frame's header, whose length stays true."""
    parts = frames(bytes(data))
    if parts:
        at = dice.randrange(len(parts))
        header, body = parts[at][:1], bytearray(parts[at][_FRAME_HEADER:])
        for _ in range(dice.choice((1, 1, 2))):
            body = dice.choice((_flip, _number, _nudge, _cut, _remove, _insert))(dice, body, others)
        parts[at] = header + struct.pack("!I", len(body) + 4) + bytes(body)
    return bytearray(b"".join(parts))


_MUTATIONS: tuple[Mutation, ...] = (
    _flip,
    _number,
    _nudge,
    _cut,
    _remove,
    _insert,
    _splice,
    _shuffle_frames,
    _shuffle_frames,
    *([_inside_a_frame] * 8),
)
