"""Compiled loops over values: from field positions to the buffers of an Arrow array.

Every function gets the bytes, the fields' offsets and lengths (negative: no value) and fills output arrays. It returns
WELL_FORMED, or the index of the first field that is not a value of its type. The fields are known to lie inside the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from headwater.changes import EPOCH_2000_SECONDS
from headwater.wire.kernels import WELL_FORMED, _i16, _i32, _u32, _u64

MINUS, ZERO, POINT = ord("-"), ord("0"), ord(".")
LETTER_TEN = ord("a") - 10
"""What is added to a hexadecimal digit beyond nine."""
_BACKSLASH, _X = ord("\\"), ord("x")
_JSONB_VERSION = 1
_ARRAY_HEADER, _DIMENSION = 12, 8
"""Number of dimensions, flags, the elements' oid; then a length and a lower bound for each dimension."""
_MOST_DIMENSIONS = 6
_FIXED = "int64(uint8[::1], int64[::1], int64[::1], {}[::1])"
_SHIFTED = "int64(uint8[::1], int64[::1], int64[::1], int64, {}[::1])"
DATE_SHIFT = EPOCH_2000_SECONDS // 86_400
TIMESTAMP_SHIFT = EPOCH_2000_SECONDS * 1_000_000
_I32_MAX = 2147483647


@njit("int64(int64[::1], uint8[::1])", cache=True, nogil=True)
def validity(flen: Any, bitmap: Any) -> Any:
    """Fill the validity bitmap; returns the number of NULLs."""
    nulls = 0
    for i in range(flen.shape[0]):
        if flen[i] >= 0:
            bitmap[i >> 3] |= np.uint8(1 << (i & 7))
        else:
            nulls += 1
    return nulls


@njit(cache=True, nogil=True, inline="always")
def _signed(buf: Any, p: int, size: int) -> Any:
    # Three loops in the machine code: which one is decided before it begins.
    if size == 2:
        return _i16(buf, p)
    if size == 4:
        return _i32(buf, p)
    return np.int64(_u64(buf, p))


@njit([_FIXED.format(type) for type in ("int16", "int32", "int64")], cache=True, nogil=True)
def integers(buf: Any, foff: Any, flen: Any, out: Any) -> Any:
    """Of as many bytes as `out` has for each. A float is its bits; the byte order is all that differs."""
    size = out.itemsize
    for i in range(foff.shape[0]):
        if flen[i] < 0:
            out[i] = 0
        elif flen[i] != size:
            return i
        else:
            out[i] = _signed(buf, foff[i], size)
    return WELL_FORMED


@njit(_FIXED.format("int64"), cache=True, nogil=True)
def oid(buf: Any, foff: Any, flen: Any, out: Any) -> Any:
    for i in range(foff.shape[0]):
        if flen[i] < 0:
            out[i] = 0
        elif flen[i] != 4:
            return i
        else:
            out[i] = _u32(buf, foff[i])
    return WELL_FORMED


@njit("int64(uint8[::1], int64[::1], int64[::1], uint8[::1])", cache=True, nogil=True)
def boolean(buf: Any, foff: Any, flen: Any, bitmap: Any) -> Any:
    for i in range(foff.shape[0]):
        if flen[i] >= 0:
            if flen[i] != 1 or buf[foff[i]] > 1:
                return i
            if buf[foff[i]] == 1:
                bitmap[i >> 3] |= np.uint8(1 << (i & 7))
    return WELL_FORMED


@njit([_SHIFTED.format(type) for type in ("int32", "int64")], cache=True, nogil=True)
def since_1970(buf: Any, foff: Any, flen: Any, shift: Any, out: Any) -> Any:
    """Days or microseconds since 2000, shifted. Infinity, and what the shift cannot hold, is out of range."""
    size = out.itemsize
    # The lowest and the highest stand for infinity; the highest lies beyond what the shift leaves.
    lowest = np.int64(-1) << np.int64(8 * size - 1)
    most = np.int64(-1) - lowest - shift
    for i in range(foff.shape[0]):
        if flen[i] < 0:
            out[i] = 0
        elif flen[i] != size:
            return i
        else:
            v = _signed(buf, foff[i], size)
            if v > most or v == lowest:
                return i
            out[i] = v + shift
    return WELL_FORMED


@njit("int64(int64[::1])", cache=True, nogil=True)
def total_length(flen: Any) -> Any:
    t = np.int64(0)
    for i in range(flen.shape[0]):
        if flen[i] > 0:
            t += flen[i]
    return t


@njit("void(uint8[::1], int64[::1], int64[::1], int32[::1], uint8[::1])", cache=True, nogil=True)
def varlen(buf: Any, foff: Any, flen: Any, offsets: Any, data: Any) -> None:
    t = np.int64(0)
    for i in range(foff.shape[0]):
        offsets[i] = np.int32(t)
        n = flen[i]
        if n > 0:
            o = foff[i]
            data[t : t + n] = buf[o : o + n]
            t += n
    offsets[foff.shape[0]] = np.int32(t)


@njit("int64(uint8[::1], int64[::1], int64[::1])", cache=True, nogil=True)
def skip_jsonb_version(buf: Any, foff: Any, flen: Any) -> Any:
    """Step over jsonb's version byte, in place."""
    for i in range(foff.shape[0]):
        if flen[i] >= 0:
            if flen[i] < 1 or buf[foff[i]] != _JSONB_VERSION:
                return i
            foff[i] += 1
            flen[i] -= 1
    return WELL_FORMED


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1], uint8[::1])", cache=True, nogil=True)
def uuid_text(buf: Any, foff: Any, flen: Any, offsets: Any, data: Any) -> Any:
    t = np.int64(0)
    for i in range(foff.shape[0]):
        offsets[i] = np.int32(t)
        if flen[i] < 0:
            continue
        if flen[i] != 16:
            return i
        for j in range(16):
            if j == 4 or j == 6 or j == 8 or j == 10:
                data[t] = MINUS
                t += 1
            b = np.int64(buf[foff[i] + j])
            for shift in range(4, -1, -4):
                nibble = (b >> shift) & 15
                data[t] = ZERO + nibble if nibble < 10 else LETTER_TEN + nibble
                t += 1
    offsets[foff.shape[0]] = np.int32(t)
    return WELL_FORMED


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1], int64)", cache=True, nogil=True)
def array_offsets(buf: Any, foff: Any, flen: Any, offsets: Any, element_oid: Any) -> Any:
    """List offsets of one-dimensional arrays. Returns WELL_FORMED, the index of a malformed value, or -2 - index of a value with
    more than one dimension or a lower bound other than 1."""
    t = np.int64(0)
    for i in range(foff.shape[0]):
        offsets[i] = np.int32(t)
        if flen[i] < 0:
            continue
        p = foff[i]
        if flen[i] < _ARRAY_HEADER:
            return i
        ndim = _i32(buf, p)
        if ndim == 0:
            continue
        if ndim < 0 or ndim > _MOST_DIMENSIONS:
            return i
        if ndim != 1:
            return -2 - i
        if flen[i] < _ARRAY_HEADER + _DIMENSION or (element_oid != 0 and _u32(buf, p + 8) != element_oid):
            return i
        n = _i32(buf, p + 12)
        # Each element has a length of four bytes, even NULL: more of them than fit would only be room asked for.
        if n < 0 or n > (flen[i] - _ARRAY_HEADER - _DIMENSION) // 4:
            return i
        if _i32(buf, p + 16) != 1:
            return -2 - i
        t += n
    if t > _I32_MAX:
        return foff.shape[0] - 1
    offsets[foff.shape[0]] = np.int32(t)
    return WELL_FORMED


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1], int64[::1], int64[::1])", cache=True, nogil=True)
def array_elements(buf: Any, foff: Any, flen: Any, offsets: Any, eoff: Any, elen: Any) -> Any:
    """Where each element of the arrays lies."""
    for i in range(foff.shape[0]):
        n = offsets[i + 1] - offsets[i]
        p = foff[i] + _ARRAY_HEADER + _DIMENSION
        stop = foff[i] + flen[i]
        for j in range(n):
            if stop - p < 4:
                return i
            size = _i32(buf, p)
            p += 4
            if size > stop - p or size < -1:
                return i
            eoff[offsets[i] + j] = p
            elen[offsets[i] + j] = size
            if size > 0:
                p += size
        if n > 0 and p != stop:
            return i
    return WELL_FORMED


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1], uint8[::1])", cache=True, nogil=True)
def hex_bytes(buf: Any, foff: Any, flen: Any, offsets: Any, data: Any) -> Any:
    r"""bytea's hex text (\x...) to bytes."""
    t = np.int64(0)
    for i in range(foff.shape[0]):
        offsets[i] = np.int32(t)
        if flen[i] < 0:
            continue
        p = foff[i]
        if flen[i] < 2 or flen[i] % 2 != 0 or buf[p] != _BACKSLASH or buf[p + 1] != _X:
            return i
        for j in range(p + 2, p + flen[i], 2):
            v = np.int64(0)
            for k in range(j, j + 2):
                c = np.int64(buf[k])
                if ZERO <= c < ZERO + 10:
                    v = v * 16 + (c - ZERO)
                elif LETTER_TEN + 10 <= c < LETTER_TEN + 16:
                    v = v * 16 + (c - LETTER_TEN)
                else:
                    return i
            data[t] = v
            t += 1
    offsets[foff.shape[0]] = np.int32(t)
    return WELL_FORMED
