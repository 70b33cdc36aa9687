"""Compiled loops over COPY binary data: find tuples, find fields. As in `kernels`: arrays in, numbers out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from headwater.wire.kernels import NO_ROOM, WELL_FORMED, _i16, _i32, _u32
from headwater.wire.letters import COPY_DATA, FRAME_HEADER

COPY_SIGNATURE = np.frombuffer(b"PGCOPY\n\xff\r\n\x00", np.uint8)


@njit("int64(uint8[::1], int64, int64[::1], int64[::1], int64[::1])", cache=True, nogil=True)
def copy_rows(buf: Any, first: Any, off: Any, end: Any, result: Any) -> Any:
    """List the tuples of COPY binary data in whole CopyData frames from byte `first`. A frame may hold several tuples or the
    trailer. result: [rows, ended]. Returns WELL_FORMED, or where the bytes are malformed;
    NO_ROOM asks for larger arrays."""
    pos = first
    used = buf.shape[0]
    k = 0
    ended = 0
    while pos < used:
        if used - pos < FRAME_HEADER or buf[pos] != COPY_DATA:
            return pos
        size = _u32(buf, pos + 1)
        stop = pos + 1 + size
        if size < 4 or stop > used:
            return pos
        p = pos + 5
        while p < stop:
            if ended == 1 or stop - p < 2:
                return p
            n = _i16(buf, p)
            if n == -1:
                ended = 1
                p += 2
                continue
            if n < 0:
                return p
            if k >= off.shape[0]:
                return NO_ROOM
            off[k] = p
            p += 2
            for _ in range(n):
                if stop - p < 4:
                    return p
                flen = _i32(buf, p)
                p += 4
                if flen > 0:
                    if flen > stop - p:
                        return p - 4
                    p += flen
                elif flen < -1:
                    return p - 4
            end[k] = p
            k += 1
        pos = stop
    result[0] = k
    result[1] = ended
    return WELL_FORMED


@njit("int64(uint8[::1], int64[::1], int64, int64[:,::1], int64[:,::1])", cache=True, nogil=True)
def copy_fields(buf: Any, off: Any, ncols: Any, foff: Any, flen: Any) -> Any:
    """Where each field of each listed tuple lies. Returns WELL_FORMED, or where the number of fields is not the expected one."""
    for i in range(off.shape[0]):
        p = off[i]
        if _i16(buf, p) != ncols:
            return p
        p += 2
        for c in range(ncols):
            size = _i32(buf, p)
            p += 4
            foff[c, i] = p
            flen[c, i] = size
            if size > 0:
                p += size
    return WELL_FORMED
