"""Compiled loops over values: from field positions to the buffers of an Arrow array.

Every function gets the bytes, the fields' offsets and lengths (negative: no value) and fills output arrays. It returns -1,
or the index of the first field that is not a value of its type. The fields are known to lie inside the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from headwater.wire.kernels import _i16, _i32, _u32, _u64
from headwater.wire.messages import EPOCH_2000_SECONDS

_FIXED = "int64(uint8[::1], int64[::1], int64[::1], int64[::1])"
_DATE_SHIFT = EPOCH_2000_SECONDS // 86_400
_TIMESTAMP_SHIFT = EPOCH_2000_SECONDS * 1_000_000
_I64_MAX = np.int64(9223372036854775807)
_I64_MIN = np.int64(-9223372036854775808)


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


@njit("int64(uint8[::1], int64[::1], int64[::1], int16[::1])", cache=True, nogil=True)
def int2(buf: Any, foff: Any, flen: Any, out: Any) -> Any:
    for i in range(foff.shape[0]):
        if flen[i] < 0:
            out[i] = 0
        elif flen[i] != 2:
            return i
        else:
            out[i] = np.int16(_i16(buf, foff[i]))
    return -1


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1])", cache=True, nogil=True)
def int4(buf: Any, foff: Any, flen: Any, out: Any) -> Any:
    for i in range(foff.shape[0]):
        if flen[i] < 0:
            out[i] = 0
        elif flen[i] != 4:
            return i
        else:
            out[i] = np.int32(_i32(buf, foff[i]))
    return -1


@njit(_FIXED, cache=True, nogil=True)
def int8(buf: Any, foff: Any, flen: Any, out: Any) -> Any:
    for i in range(foff.shape[0]):
        if flen[i] < 0:
            out[i] = 0
        elif flen[i] != 8:
            return i
        else:
            out[i] = np.int64(_u64(buf, foff[i]))
    return -1


@njit(_FIXED, cache=True, nogil=True)
def oid(buf: Any, foff: Any, flen: Any, out: Any) -> Any:
    for i in range(foff.shape[0]):
        if flen[i] < 0:
            out[i] = 0
        elif flen[i] != 4:
            return i
        else:
            out[i] = _u32(buf, foff[i])
    return -1


@njit("int64(uint8[::1], int64[::1], int64[::1], uint8[::1])", cache=True, nogil=True)
def boolean(buf: Any, foff: Any, flen: Any, bitmap: Any) -> Any:
    for i in range(foff.shape[0]):
        if flen[i] >= 0:
            if flen[i] != 1 or buf[foff[i]] > 1:
                return i
            if buf[foff[i]] == 1:
                bitmap[i >> 3] |= np.uint8(1 << (i & 7))
    return -1


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1])", cache=True, nogil=True)
def date(buf: Any, foff: Any, flen: Any, out: Any) -> Any:
    """Days since 1970. Infinity, and what the shift cannot hold, is out of range."""
    for i in range(foff.shape[0]):
        if flen[i] < 0:
            out[i] = 0
        elif flen[i] != 4:
            return i
        else:
            v = _i32(buf, foff[i])
            if v == 2147483647 or v == -2147483648 or v > 2147483647 - _DATE_SHIFT:
                return i
            out[i] = np.int32(v + _DATE_SHIFT)
    return -1


@njit(_FIXED, cache=True, nogil=True)
def timestamp(buf: Any, foff: Any, flen: Any, out: Any) -> Any:
    """Microseconds since 1970. Infinity, and what the shift cannot hold, is out of range."""
    for i in range(foff.shape[0]):
        if flen[i] < 0:
            out[i] = 0
        elif flen[i] != 8:
            return i
        else:
            v = np.int64(_u64(buf, foff[i]))
            if v == _I64_MIN or v > _I64_MAX - _TIMESTAMP_SHIFT:
                return i
            out[i] = v + _TIMESTAMP_SHIFT
    return -1


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
            if flen[i] < 1 or buf[foff[i]] != 1:
                return i
            foff[i] += 1
            flen[i] -= 1
    return -1


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
                data[t] = 45
                t += 1
            b = np.int64(buf[foff[i] + j])
            for shift in range(4, -1, -4):
                nibble = (b >> shift) & 15
                data[t] = 48 + nibble if nibble < 10 else 87 + nibble
                t += 1
    offsets[foff.shape[0]] = np.int32(t)
    return -1


@njit("int64(uint8[::1], int64[::1], int64[::1], int64, int64, uint64[:,::1])", cache=True, nogil=True)
def numeric_decimal(buf: Any, foff: Any, flen: Any, precision: Any, scale: Any, out: Any) -> Any:
    """128-bit unscaled values at `scale`. NaN, infinities, or digits beyond precision or scale are out of range: Arrow
    believes the bytes it is given, and whoever reads the file would meet a value that its own type forbids."""
    # 10 ** precision, which is 127 bits at most, as two words.
    beyond_low, beyond_high = np.uint64(1), np.uint64(0)
    for _ in range(precision):
        low_part = (beyond_low & np.uint64(0xFFFFFFFF)) * np.uint64(10)
        high_part = (beyond_low >> np.uint64(32)) * np.uint64(10) + (low_part >> np.uint64(32))
        beyond_low = (low_part & np.uint64(0xFFFFFFFF)) | (high_part << np.uint64(32))
        beyond_high = beyond_high * np.uint64(10) + (high_part >> np.uint64(32))
    whole = scale // 4
    rest = scale - 4 * whole
    up = np.uint64(1)
    for _ in range(rest):
        up *= np.uint64(10)
    down = np.int64(1)
    for _ in range(4 - rest):
        down *= 10
    limb = np.zeros(4, np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    for i in range(foff.shape[0]):
        out[i, 0] = 0
        out[i, 1] = 0
        if flen[i] < 0:
            continue
        p = foff[i]
        if flen[i] < 8:
            return i
        ndigits = _i16(buf, p)
        weight = _i16(buf, p + 2)
        sign = (np.int64(buf[p + 4]) << 8) | np.int64(buf[p + 5])
        if ndigits < 0 or flen[i] != 8 + 2 * ndigits or (sign != 0 and sign != 0x4000):
            return i
        limb[:] = 0
        groups = weight + 1 + whole
        if groups > 40:
            return i
        # Groups that reach into the scale; a value that starts below it may only consist of zeros.
        kept = groups + (1 if rest > 0 else 0) if groups >= 0 else 0
        for g in range(kept):
            d = np.int64(0)
            if g < ndigits:
                d = _i16(buf, p + 8 + 2 * g)
                if d < 0 or d > 9999:
                    return i
            factor = np.uint64(10000)
            if g >= groups:
                if d % down != 0:
                    return i
                d //= down
                factor = up
            carry = np.uint64(d)
            for j in range(4):
                v = limb[j] * factor + carry
                limb[j] = v & mask
                carry = v >> np.uint64(32)
            if carry != 0:
                return i
        for g in range(kept, ndigits):
            if _i16(buf, p + 8 + 2 * g) != 0:
                return i
        low = limb[0] | (limb[1] << np.uint64(32))
        high = limb[2] | (limb[3] << np.uint64(32))
        if high > beyond_high or (high == beyond_high and low >= beyond_low):
            return i
        if sign == 0x4000:
            low = ~low + np.uint64(1)
            high = ~high + (np.uint64(1) if low == 0 else np.uint64(0))
        out[i, 0] = low
        out[i, 1] = high
    return -1


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1], uint8[::1], int64, boolean)", cache=True, nogil=True)
def numeric_text(buf: Any, foff: Any, flen: Any, offsets: Any, data: Any, limit: Any, write: Any) -> Any:
    """Postgres's own text of each numeric. First with write=False for the offsets, then with write=True for the bytes.
    Returns -1 and leaves the total in offsets[n]; the index of the first malformed value; or -2 where the text of all is
    longer than `limit`: ten bytes may stand for 131,072 digits, so it is looked at before each value."""
    t = np.int64(0)
    for i in range(foff.shape[0]):
        if t > limit:
            return -2
        offsets[i] = np.int32(t)
        if flen[i] < 0:
            continue
        p = foff[i]
        if flen[i] < 8:
            return i
        ndigits = _i16(buf, p)
        weight = _i16(buf, p + 2)
        sign = (np.int64(buf[p + 4]) << 8) | np.int64(buf[p + 5])
        dscale = (np.int64(buf[p + 6]) << 8) | np.int64(buf[p + 7])
        # Postgres keeps the scale in 14 bits.
        if ndigits < 0 or flen[i] != 8 + 2 * ndigits or dscale > 16383:
            return i
        if sign == 0xC000:
            if write:
                data[t], data[t + 1], data[t + 2] = 78, 97, 78
            t += 3
            continue
        if sign == 0xD000 or sign == 0xF000:
            if sign == 0xF000:
                if write:
                    data[t] = 45
                t += 1
            word = (73, 110, 102, 105, 110, 105, 116, 121)
            for c in word:
                if write:
                    data[t] = c
                t += 1
            continue
        if sign == 0x4000:
            if write:
                data[t] = 45
            t += 1
        elif sign != 0:
            return i
        if weight < 0:
            if write:
                data[t] = 48
            t += 1
        else:
            leading = True
            for g in range(weight + 1):
                d = _i16(buf, p + 8 + 2 * g) if g < ndigits else np.int64(0)
                if d < 0 or d > 9999:
                    return i
                div = np.int64(1000)
                while div > 0:
                    digit = d // div % 10
                    if digit != 0 or not leading or (g == weight and div == 1):
                        if write:
                            data[t] = 48 + digit
                        t += 1
                        leading = False
                    div //= 10
        if dscale > 0:
            if write:
                data[t] = 46
            t += 1
            written = np.int64(0)
            g = weight + 1
            while written < dscale:
                d = np.int64(0)
                if 0 <= g < ndigits:
                    d = _i16(buf, p + 8 + 2 * g)
                    if d < 0 or d > 9999:
                        return i
                div = np.int64(1000)
                while div > 0 and written < dscale:
                    if write:
                        data[t] = 48 + d // div % 10
                    t += 1
                    written += 1
                    div //= 10
                g += 1
    if t > limit:
        return -2
    offsets[foff.shape[0]] = np.int32(t)
    return -1


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1], int64)", cache=True, nogil=True)
def array_offsets(buf: Any, foff: Any, flen: Any, offsets: Any, element_oid: Any) -> Any:
    """List offsets of one-dimensional arrays. Returns -1, the index of a malformed value, or -2 - index of a value with
    more than one dimension or a lower bound other than 1."""
    t = np.int64(0)
    for i in range(foff.shape[0]):
        offsets[i] = np.int32(t)
        if flen[i] < 0:
            continue
        p = foff[i]
        if flen[i] < 12:
            return i
        ndim = _i32(buf, p)
        if ndim == 0:
            continue
        if ndim < 0 or ndim > 6:
            return i
        if ndim != 1:
            return -2 - i
        if flen[i] < 20 or (element_oid != 0 and _u32(buf, p + 8) != element_oid):
            return i
        n = _i32(buf, p + 12)
        # Each element has a length of four bytes, even NULL: more of them than fit would only be room asked for.
        if n < 0 or n > (flen[i] - 20) // 4:
            return i
        if _i32(buf, p + 16) != 1:
            return -2 - i
        t += n
    if t > 2147483647:
        return foff.shape[0] - 1
    offsets[foff.shape[0]] = np.int32(t)
    return -1


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1], int64[::1], int64[::1])", cache=True, nogil=True)
def array_elements(buf: Any, foff: Any, flen: Any, offsets: Any, eoff: Any, elen: Any) -> Any:
    """Where each element of the arrays lies."""
    for i in range(foff.shape[0]):
        n = offsets[i + 1] - offsets[i]
        p = foff[i] + 20
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
    return -1


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1], uint8[::1])", cache=True, nogil=True)
def hex_bytes(buf: Any, foff: Any, flen: Any, offsets: Any, data: Any) -> Any:
    r"""bytea's hex text (\x...) to bytes."""
    t = np.int64(0)
    for i in range(foff.shape[0]):
        offsets[i] = np.int32(t)
        if flen[i] < 0:
            continue
        p = foff[i]
        if flen[i] < 2 or flen[i] % 2 != 0 or buf[p] != 92 or buf[p + 1] != 120:
            return i
        for j in range(p + 2, p + flen[i], 2):
            v = np.int64(0)
            for k in range(j, j + 2):
                c = np.int64(buf[k])
                if 48 <= c <= 57:
                    v = v * 16 + (c - 48)
                elif 97 <= c <= 102:
                    v = v * 16 + (c - 87)
                else:
                    return i
            data[t] = v
            t += 1
    offsets[foff.shape[0]] = np.int32(t)
    return -1
