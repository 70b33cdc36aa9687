"""Compiled loops over numerics: to 128-bit decimals, and to the text that Postgres itself gives them.

A numeric is a header (number of digits, weight of the first, sign, scale for display) and digits of base 10,000.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from headwater.wire.kernels import NO_ROOM, WELL_FORMED, _i16
from headwater.wire.value_kernels import MINUS, POINT, ZERO

_HEADER = 8
_BASE = 10_000
# What stands for the sign.
_NEGATIVE, _NAN, _INFINITY, _MINUS_INFINITY = 0x4000, 0xC000, 0xD000, 0xF000
_MOST_SCALE = 16383
"""Postgres keeps the scale in 14 bits."""
_NAN_TEXT, _INFINITY_TEXT = tuple(b"NaN"), tuple(b"Infinity")


@njit("int64(uint8[::1], int64[::1], int64[::1], int64, int64, uint64[:,::1])", cache=True, nogil=True)
def numeric_decimal(buf: Any, foff: Any, flen: Any, precision: Any, scale: Any, out: Any) -> Any:
    """128-bit unscaled values at `scale`. NaN, infinities, or digits beyond precision or scale are out of range: Arrow
    does not check the bytes it is given, and a reader of the file would find a value that its own type forbids."""
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
        if flen[i] < _HEADER:
            return i
        ndigits = _i16(buf, p)
        weight = _i16(buf, p + 2)
        sign = (np.int64(buf[p + 4]) << 8) | np.int64(buf[p + 5])
        if ndigits < 0 or flen[i] != _HEADER + 2 * ndigits or (sign != 0 and sign != _NEGATIVE):
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
                d = _i16(buf, p + _HEADER + 2 * g)
                if d < 0 or d >= _BASE:
                    return i
            factor = np.uint64(_BASE)
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
            if _i16(buf, p + _HEADER + 2 * g) != 0:
                return i
        low = limb[0] | (limb[1] << np.uint64(32))
        high = limb[2] | (limb[3] << np.uint64(32))
        if high > beyond_high or (high == beyond_high and low >= beyond_low):
            return i
        if sign == _NEGATIVE:
            low = ~low + np.uint64(1)
            high = ~high + (np.uint64(1) if low == 0 else np.uint64(0))
        out[i, 0] = low
        out[i, 1] = high
    return WELL_FORMED


@njit("int64(uint8[::1], int64[::1], int64[::1], int32[::1], uint8[::1], int64, boolean)", cache=True, nogil=True)
def numeric_text(buf: Any, foff: Any, flen: Any, offsets: Any, data: Any, limit: Any, write: Any) -> Any:
    """Postgres's own text of each numeric. First with write=False for the offsets, then with write=True for the bytes.
    Returns WELL_FORMED and leaves the total in offsets[n]; the index of the first malformed value; or NO_ROOM where the text
    of all is longer than `limit`: ten bytes may stand for 131,072 digits, so it is looked at before each value."""
    t = np.int64(0)
    for i in range(foff.shape[0]):
        if t > limit:
            return NO_ROOM
        offsets[i] = np.int32(t)
        if flen[i] < 0:
            continue
        p = foff[i]
        if flen[i] < _HEADER:
            return i
        ndigits = _i16(buf, p)
        weight = _i16(buf, p + 2)
        sign = (np.int64(buf[p + 4]) << 8) | np.int64(buf[p + 5])
        dscale = (np.int64(buf[p + 6]) << 8) | np.int64(buf[p + 7])
        if ndigits < 0 or flen[i] != _HEADER + 2 * ndigits or dscale > _MOST_SCALE:
            return i
        if sign == _NAN:
            if write:
                for j in range(len(_NAN_TEXT)):
                    data[t + j] = _NAN_TEXT[j]
            t += len(_NAN_TEXT)
            continue
        if sign == _INFINITY or sign == _MINUS_INFINITY:
            if sign == _MINUS_INFINITY:
                if write:
                    data[t] = MINUS
                t += 1
            if write:
                for j in range(len(_INFINITY_TEXT)):
                    data[t + j] = _INFINITY_TEXT[j]
            t += len(_INFINITY_TEXT)
            continue
        if sign == _NEGATIVE:
            if write:
                data[t] = MINUS
            t += 1
        elif sign != 0:
            return i
        if weight < 0:
            if write:
                data[t] = ZERO
            t += 1
        else:
            leading = True
            for g in range(weight + 1):
                d = _i16(buf, p + _HEADER + 2 * g) if g < ndigits else np.int64(0)
                if d < 0 or d >= _BASE:
                    return i
                div = np.int64(1000)
                while div > 0:
                    digit = d // div % 10
                    if digit != 0 or not leading or (g == weight and div == 1):
                        if write:
                            data[t] = ZERO + digit
                        t += 1
                        leading = False
                    div //= 10
        if dscale > 0:
            if write:
                data[t] = POINT
            t += 1
            written = np.int64(0)
            g = weight + 1
            while written < dscale:
                d = np.int64(0)
                if 0 <= g < ndigits:
                    d = _i16(buf, p + _HEADER + 2 * g)
                    if d < 0 or d >= _BASE:
                        return i
                div = np.int64(1000)
                while div > 0 and written < dscale:
                    if write:
                        data[t] = ZERO + d // div % 10
                    t += 1
                    written += 1
                    div //= 10
                g += 1
    if t > limit:
        return NO_ROOM
    offsets[foff.shape[0]] = np.int32(t)
    return WELL_FORMED
