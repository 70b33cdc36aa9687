"""Values of a server that lies, or of a stream that was crafted: an error, and neither memory nor a wrong value."""

from __future__ import annotations

import struct
import time
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from headwater.errors import HeadwaterError, ProtocolError, ValueOutOfRange
from headwater.schema.table import ColumnSchema
from headwater.schema.types import BUILT_IN
from headwater.wire.columns import decode_column
from headwater.wire.letters import FIELD_BINARY, FIELD_TEXT

PLAIN = ColumnSchema("n", BUILT_IN[1700])


def declared(precision: int, scale: int) -> ColumnSchema:
    return ColumnSchema("n", BUILT_IN[1700], typmod=(precision << 16 | scale & 0x7FF) + 4)


def sent(*digits: int, weight: int, scale: int = 0, sign: int = 0) -> bytes:
    """As numeric_send writes it."""
    return struct.pack(f"!hhHH{len(digits)}h", len(digits), weight, sign, scale, *digits)


def sent_exactly(value: Decimal) -> bytes:
    """A value whose fraction has a multiple of four digits."""
    scale = -int(value.as_tuple().exponent)
    assert scale % 4 == 0
    unscaled = int("".join(map(str, value.as_tuple().digits)))
    groups: list[int] = []
    while unscaled:
        unscaled, group = divmod(unscaled, 10000)
        groups.insert(0, group)
    return sent(*groups, weight=len(groups) - scale // 4 - 1, scale=scale, sign=0x4000 if value < 0 else 0)


def decoded(column: ColumnSchema, *values: bytes, fmt: int = FIELD_BINARY) -> pa.Array:
    lengths = np.array([len(value) for value in values], np.int64)
    offsets = np.cumsum(lengths) - lengths
    return decode_column(column, np.frombuffer(bytearray(b"".join(values)), np.uint8), offsets, lengths, fmt)


@pytest.mark.parametrize("count", [4_000, 300_000])
def test_a_few_crafted_bytes_do_not_become_gigabytes_of_digits(count: int) -> None:
    """Each is a value that Postgres can hold, ten bytes for 131,069 digits; together they would be up to 37 GiB."""
    crafted = [sent(1, weight=32767)] * count
    began = time.monotonic()
    with pytest.raises(ValueOutOfRange, match="too long as text") as caught:
        decoded(PLAIN, *crafted)
    # The time it takes to write 256 MiB of digits; for all of them it would be minutes.
    assert time.monotonic() - began < 30
    assert "MiB of digits" in caught.value.detail
    assert caught.value.hint


def test_a_fraction_longer_than_postgres_can_hold_is_refused() -> None:
    assert decoded(PLAIN, sent(1, weight=0, scale=16383)).to_pylist() == ["1." + "0" * 16383]
    with pytest.raises(HeadwaterError):
        decoded(PLAIN, sent(1, weight=0, scale=16384))
    with pytest.raises(HeadwaterError):
        decoded(PLAIN, sent(1, weight=0, scale=65535))


def test_long_numerics_that_are_honest_arrive() -> None:
    assert decoded(PLAIN, sent(1, weight=32767)).to_pylist() == ["1" + "0" * 131068]
    dense = sent(*([9876] * 10_000), weight=9_999)
    assert decoded(PLAIN, *[dense] * 200).to_pylist() == ["9876" * 10_000] * 200


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("precision", "scale", "largest"),
    [
        (4, 0, "9999"),
        (8, 4, "9999.9999"),
        (9, 4, "99999.9999"),
        (18, 0, "9" * 18),
        (19, 0, "9" * 19),
        (20, 0, "9" * 20),
        (38, 0, "9" * 38),
        (38, 8, "9" * 30 + ".99999999"),
        (5, -2, "9" * 7),
        (4, 4, "0.9999"),
    ],
)
def test_a_decimal_beyond_its_declared_precision_is_refused(
    precision: int, scale: int, largest: str, sign: int
) -> None:
    column = declared(precision, scale)
    fits = Decimal(largest if sign > 0 else f"-{largest}")
    # Decimal's own context would round 39 digits.
    beyond = Decimal(str((int(largest.replace(".", "")) + 1) * sign) + "E-" + str(max(scale, 0)))
    assert decoded(column, sent_exactly(fits)).to_pylist() == [fits]
    with pytest.raises(ValueOutOfRange):
        decoded(column, sent_exactly(beyond))
    with pytest.raises(ValueOutOfRange):
        decoded(column, f"{beyond:f}".encode(), fmt=FIELD_TEXT)


def test_an_array_that_claims_more_elements_than_it_has_bytes_is_refused() -> None:
    claims = struct.pack("!iiiii", 1, 1, 23, 1_000_000, 1)
    with pytest.raises(ProtocolError):
        decoded(ColumnSchema("a", BUILT_IN[1007]), claims + bytes(1_000_000))
