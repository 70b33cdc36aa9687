"""From field positions to Arrow arrays: one decoder for COPY binary and for pgoutput, binary and text.

A value that has no exact counterpart (infinity, NaN in a decimal, an array of two dimensions) raises ValueOutOfRange with
the column's name: no value changes silently (invariant 11).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import ProtocolError, ValueOutOfRange
from headwater.schema.arrow import arrow_type
from headwater.schema.table import ColumnSchema
from headwater.schema.types import Kind, PgType
from headwater.wire import numeric_kernels
from headwater.wire import value_kernels as vk
from headwater.wire.array_text import parse_array_text
from headwater.wire.kernels import NO_ROOM
from headwater.wire.letters import FIELD_TEXT

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

MAX_TEXT_BYTES = 2**31 - 1
# Digits take half as many bytes on the wire as in text, but zeros at either end take none: ten bytes are 1e131071. So much
# may come of such zeros in one piece, which is 8 MiB on the wire when tables are copied.
_SPARSE_NUMERIC_TEXT_BYTES = 256 << 20

_RANGED = frozenset({Kind.NUMERIC, Kind.DATE, Kind.TIMESTAMP, Kind.TIMESTAMPTZ})


def decode_column(column: ColumnSchema, buf: Bytes, foff: Ints, flen: Ints, fmt: int) -> pa.Array:
    """One column's values. Negative lengths are NULL. `fmt` is FIELD_BINARY or FIELD_TEXT (0 where no value is there at all)."""
    type = arrow_type(column)
    if fmt == FIELD_TEXT or not column.type.binary:
        return _from_text(column, column.type, type, _string(column, buf, foff, flen))
    return _from_binary(column, column.type, type, buf, foff, flen)


def _from_binary(column: ColumnSchema, pg: PgType, type: pa.DataType, buf: Bytes, foff: Ints, flen: Ints) -> pa.Array:
    kind = pg.kind
    if kind is Kind.ARRAY:
        return _array(column, pg, type, buf, foff, flen)
    if kind in (Kind.TEXT, Kind.OTHER):
        return _string(column, buf, foff, flen)
    if kind is Kind.BYTEA:
        return _varlen(column, type, buf, foff, flen)
    if kind is Kind.JSONB:
        foff, flen = foff.copy(), flen.copy()
        _check(column, vk.skip_jsonb_version(buf, foff, flen), kind, foff, flen)
        return _string(column, buf, foff, flen)
    if kind is Kind.NUMERIC:
        return _numeric(column, type, buf, foff, flen)
    if kind is Kind.UUID:
        offsets, data = np.empty(len(foff) + 1, np.int32), np.empty(36 * len(foff), np.uint8)
        _check(column, vk.uuid_text(buf, foff, flen, offsets, data), kind, foff, flen)
        return _make(type, flen, pa.py_buffer(offsets), pa.py_buffer(data))
    if kind is Kind.BOOL:
        bits = np.zeros((len(foff) + 7) // 8, np.uint8)
        _check(column, vk.boolean(buf, foff, flen, bits), kind, foff, flen)
        return _make(type, flen, pa.py_buffer(bits))
    out: npt.NDArray[Any] = np.empty(len(foff), _FIXED[kind])
    if kind in _SHIFTS:
        bad = vk.since_1970(buf, foff, flen, _SHIFTS[kind], out)
    else:
        bad = (vk.oid if kind is Kind.OID else vk.integers)(buf, foff, flen, out)
    _check(column, bad, kind, foff, flen)
    return _make(type, flen, pa.py_buffer(out))


_FIXED: dict[Kind, type[Any]] = {
    Kind.INT2: np.int16,
    Kind.INT4: np.int32,
    Kind.INT8: np.int64,
    Kind.OID: np.int64,
    Kind.FLOAT4: np.int32,
    Kind.FLOAT8: np.int64,
    Kind.DATE: np.int32,
    Kind.TIMESTAMP: np.int64,
    Kind.TIMESTAMPTZ: np.int64,
}
_SHIFTS = {
    Kind.DATE: vk.DATE_SHIFT,
    Kind.TIMESTAMP: vk.TIMESTAMP_SHIFT,
    Kind.TIMESTAMPTZ: vk.TIMESTAMP_SHIFT,
}


def _make(type: pa.DataType, flen: Ints, *buffers: pa.Buffer, children: list[pa.Array] | None = None) -> pa.Array:
    n = len(flen)
    bitmap = np.zeros((n + 7) // 8, np.uint8)
    nulls = vk.validity(flen, bitmap)
    valid = pa.py_buffer(bitmap) if nulls else None
    return pa.Array.from_buffers(type, n, [valid, *buffers], null_count=nulls, children=children)


def _varlen(column: ColumnSchema, type: pa.DataType, buf: Bytes, foff: Ints, flen: Ints) -> pa.Array:
    total = vk.total_length(flen)
    if total > MAX_TEXT_BYTES:
        raise ProtocolError(f"more than 2 GiB of values of column {column.name!r} in one piece")
    offsets, data = np.empty(len(foff) + 1, np.int32), np.empty(total, np.uint8)
    vk.varlen(buf, foff, flen, offsets, data)
    return _make(type, flen, pa.py_buffer(offsets), pa.py_buffer(data))


def _string(column: ColumnSchema, buf: Bytes, foff: Ints, flen: Ints) -> pa.Array:
    array = _varlen(column, pa.string(), buf, foff, flen)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raise ValueOutOfRange(
            f"column {column.name!r} holds bytes that are not UTF-8",
            hint="The source database's encoding must be convertible to UTF-8 (SQL_ASCII is not).",
        ) from None
    return array


def _numeric(column: ColumnSchema, type: pa.DataType, buf: Bytes, foff: Ints, flen: Ints) -> pa.Array:
    if pa.types.is_decimal(type):
        words = np.empty((len(foff), 2), np.uint64)
        bad = numeric_kernels.numeric_decimal(buf, foff, flen, type.precision, type.scale, words)
        _check(column, bad, Kind.NUMERIC, foff, flen)
        return _make(type, flen, pa.py_buffer(words))
    offsets, nothing = np.empty(len(foff) + 1, np.int32), np.empty(0, np.uint8)
    limit = min(MAX_TEXT_BYTES, _SPARSE_NUMERIC_TEXT_BYTES + 4 * vk.total_length(flen))
    bad = numeric_kernels.numeric_text(buf, foff, flen, offsets, nothing, limit, False)
    if bad == NO_ROOM:
        raise _numerics_too_long(column, limit)
    _check(column, bad, Kind.NUMERIC, foff, flen)
    data = np.empty(offsets[-1], np.uint8)
    numeric_kernels.numeric_text(buf, foff, flen, offsets, data, limit, True)
    return _make(type, flen, pa.py_buffer(offsets), pa.py_buffer(data))


def _array(column: ColumnSchema, pg: PgType, type: pa.DataType, buf: Bytes, foff: Ints, flen: Ints) -> pa.Array:
    assert pg.element is not None
    offsets = np.empty(len(foff) + 1, np.int32)
    bad = vk.array_offsets(buf, foff, flen, offsets, 0)
    if bad <= -2:
        raise _several_dimensions(column)
    _check(column, bad, Kind.ARRAY, foff, flen)
    eoff, elen = np.zeros(offsets[-1], np.int64), np.zeros(offsets[-1], np.int64)
    _check(column, vk.array_elements(buf, foff, flen, offsets, eoff, elen), Kind.ARRAY, foff, flen)
    values = _from_binary(column, pg.element, type.value_type, buf, eoff, elen)
    return _make(type, flen, pa.py_buffer(offsets), children=[values])


def _check(column: ColumnSchema, bad: int, kind: Kind, foff: Ints, flen: Ints) -> None:
    if bad < 0:
        return
    offset = int(foff[bad])
    if kind in _RANGED and flen[bad] >= (8 if kind is not Kind.DATE else 4):
        raise _out_of_range(column)
    raise ProtocolError(f"column {column.name!r} holds bytes that are not a {kind}", offset=offset)


def _out_of_range(column: ColumnSchema) -> ValueOutOfRange:
    return ValueOutOfRange(
        f"column {column.name!r} holds a {column.type.name} value that the column type in the lake cannot hold exactly",
        detail="infinity, NaN, or a value outside the range of the lake column's type",
        hint="Leave the column out with a column list on the publication, or store it as text in the source.",
    )


def _numerics_too_long(column: ColumnSchema, limit: int) -> ValueOutOfRange:
    return ValueOutOfRange(
        f"column {column.name!r} holds numeric values that are too long as text",
        detail=f"the values of one batch have more than {limit >> 20} MiB of digits, nearly all of them zeros",
        hint="Leave the column out with a column list on the publication, or declare its precision in the source: "
        "numeric(38, 10).",
    )


def _several_dimensions(column: ColumnSchema) -> ValueOutOfRange:
    return ValueOutOfRange(
        f"column {column.name!r} holds an array that is not a plain list",
        detail="it has more than one dimension, or its lower bound is not 1",
        hint="Leave the column out with a column list on the publication, or store it as jsonb in the source.",
    )


def _from_text(column: ColumnSchema, pg: PgType, type: pa.DataType, text: pa.Array) -> pa.Array:
    """What a type's text output gives, with the output settings that our sessions pin."""
    if pa.types.is_string(type):
        return text
    if pg.kind is Kind.ARRAY:
        assert pg.element is not None
        parsed = parse_array_text(text)
        if parsed is None:
            raise _several_dimensions(column)
        offsets, elements, mask = parsed
        values = _from_text(column, pg.element, type.value_type, elements)
        return pa.ListArray.from_arrays(offsets, values, type=type, mask=mask)
    if pg.kind is Kind.BOOL:
        return pc.equal(text, "t")
    if pg.kind is Kind.BYTEA:
        return _bytea_text(column, text)
    try:
        return pc.cast(text, type)
    except pa.ArrowInvalid:
        raise _out_of_range(column) from None  # what Arrow says quotes the value


def _bytea_text(column: ColumnSchema, text: pa.Array) -> pa.Array:
    offsets = np.frombuffer(text.buffers()[1], np.int32)[text.offset : text.offset + len(text) + 1].astype(np.int64)
    flen = np.where(text.is_valid().to_numpy(zero_copy_only=False), np.diff(offsets), -1)
    data = text.buffers()[2]
    buf = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    out_offsets, out = np.empty(len(text) + 1, np.int32), np.empty(len(buf) // 2, np.uint8)
    _check(column, vk.hex_bytes(buf, offsets[:-1].copy(), flen, out_offsets, out), Kind.BYTEA, offsets, flen)
    return _make(pa.binary(), flen, pa.py_buffer(out_offsets), pa.py_buffer(out))
