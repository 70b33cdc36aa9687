"""Compiled loops over a stream's bytes: find messages, find fields. Those over COPY data are in `copy_kernels`.

Everything here takes arrays and returns numbers; nothing allocates Python objects. A negative or non-zero status with an
offset says what was malformed; the callers turn it into ProtocolError. Signatures are explicit so that the machine code is
compiled once, during set-up, and loaded from the cache afterwards (2 to 4 ms a function instead of a second).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from headwater.wire.letters import (
    BEGIN,
    COMMIT,
    COPY_DATA,
    DELETE,
    FIELD_BINARY,
    FIELD_NULL,
    FIELD_TEXT,
    FIELD_UNCHANGED,
    FRAME_HEADER,
    INSERT,
    KEEPALIVE_SIZE,
    MESSAGE,
    NEW_ROW,
    OLD_FULL,
    OLD_KEY,
    ORIGIN,
    PRIMARY_KEEPALIVE,
    RELATION,
    STREAM_ABORT,
    STREAM_COMMIT,
    STREAM_START,
    STREAM_STOP,
    TRUNCATE,
    TYPE,
    UPDATE,
    XLOG_DATA,
    XLOG_DATA_HEADER,
)

# Positions in the scan's state array.
IN_TX, TX_COUNT, COUNT, CONSUMED, LAST_COMMIT_TX, LAST_COMMIT_END, KEEPALIVE, WAL_END, ERROR, ERROR_OFFSET = range(10)
STATE_SIZE = 10

OK, FULL, MALFORMED = 0, 1, 2
WELL_FORMED, NO_ROOM = -1, -2
"""What a kernel returns that otherwise returns where the bytes, or which of the values, are malformed."""
# Positions in ERRORS.
_, SHORT, UNKNOWN_KIND, NOT_IN_TX, BEGIN_IN_TX, COMMIT_OUTSIDE, COMMIT_OF_ANOTHER = range(7)
NOT_COPY_DATA, BAD_LENGTH, NOT_REPLICATION, BEGIN_IN_BLOCK, COMMIT_IN_BLOCK = range(7, 12)
ERRORS = (
    "",
    "message shorter than its kind requires",
    "unknown kind of message",
    "change outside a transaction",
    "BEGIN inside a transaction",
    "COMMIT outside a transaction",
    "COMMIT does not match its BEGIN",
    "frame is not CopyData",
    "frame with an impossible length",
    "neither XLogData nor keepalive",
    "BEGIN inside a block of a transaction in progress",
    "COMMIT inside a block of a transaction in progress",
)

# In place of a field's length.
IS_NULL, IS_UNCHANGED, NO_TUPLE = -1, -2, -3


@njit(cache=True, nogil=True, inline="always")
def _u64(buf: Any, p: int) -> Any:
    v = np.uint64(0)
    for j in range(8):
        v = (v << np.uint64(8)) | np.uint64(buf[p + j])
    return v


@njit(cache=True, nogil=True, inline="always")
def _u32(buf: Any, p: int) -> Any:
    return (np.int64(buf[p]) << 24) | (np.int64(buf[p + 1]) << 16) | (np.int64(buf[p + 2]) << 8) | np.int64(buf[p + 3])


@njit(cache=True, nogil=True, inline="always")
def _i32(buf: Any, p: int) -> Any:
    v = _u32(buf, p)
    return v - (np.int64(1) << 32) if v >= (np.int64(1) << 31) else v


@njit(cache=True, nogil=True, inline="always")
def _i16(buf: Any, p: int) -> Any:
    v = (np.int64(buf[p]) << 8) | np.int64(buf[p + 1])
    return v - 65536 if v >= 32768 else v


@njit(
    "int64(uint8[::1], int64, int64[::1], uint8[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    "uint64[::1], uint64[::1], int64[::1], uint32[::1], int64[::1], int64[::1], int64, int64)",
    cache=True,
    nogil=True,
)
def scan(
    buf: Any,
    used: Any,
    state: Any,
    kind: Any,
    off: Any,
    end: Any,
    relid: Any,
    tx: Any,
    tx_commit: Any,
    tx_end: Any,
    tx_time: Any,
    tx_xid: Any,
    tx_begin: Any,
    tx_last: Any,
    first_position: Any,
    in_block: Any,
) -> Any:
    """List the pgoutput messages in buf[state[CONSUMED]:used]. FULL asks for larger arrays and to be called again.

    In a block of a transaction in progress each message has an xid more, between its kind and the rest: `off` then points so
    that the rest lies where it lies in other messages, and `tx` takes the xid. What is no table's is not listed there.
    """
    shift = 4 if in_block != 0 else 0
    pos = state[CONSUMED]
    k = state[COUNT]
    while pos < used:
        if k >= kind.shape[0] or state[TX_COUNT] >= tx_commit.shape[0]:
            state[CONSUMED] = pos
            state[COUNT] = k
            return FULL
        if used - pos < FRAME_HEADER:
            state[ERROR], state[ERROR_OFFSET] = BAD_LENGTH, pos
            return MALFORMED
        if buf[pos] != COPY_DATA:
            state[ERROR], state[ERROR_OFFSET] = NOT_COPY_DATA, pos
            return MALFORMED
        size = _u32(buf, pos + 1)
        stop = pos + 1 + size
        if size < 5 or stop > used:
            state[ERROR], state[ERROR_OFFSET] = BAD_LENGTH, pos + 1
            return MALFORMED
        what = buf[pos + FRAME_HEADER]
        if what == PRIMARY_KEEPALIVE:
            if size < 4 + KEEPALIVE_SIZE:
                state[ERROR], state[ERROR_OFFSET] = SHORT, pos + 5
                return MALFORMED
            wal_end = np.int64(_u64(buf, pos + 6))
            if wal_end > state[WAL_END]:
                state[WAL_END] = wal_end
            if state[IN_TX] == 0:
                state[KEEPALIVE] = wal_end
            pos = stop
            continue
        if what != XLOG_DATA:
            state[ERROR], state[ERROR_OFFSET] = NOT_REPLICATION, pos + 5
            return MALFORMED
        if size <= 4 + XLOG_DATA_HEADER:
            state[ERROR], state[ERROR_OFFSET] = SHORT, pos + 5
            return MALFORMED
        wal_end = np.int64(_u64(buf, pos + 14))
        if wal_end > state[WAL_END]:
            state[WAL_END] = wal_end
        p = pos + FRAME_HEADER + XLOG_DATA_HEADER
        left = stop - p - shift
        c = buf[p]
        rel = np.int64(0)
        t = state[TX_COUNT]
        if c == INSERT or c == UPDATE or c == DELETE:
            if left < 8:
                state[ERROR], state[ERROR_OFFSET] = SHORT, p
                return MALFORMED
            if shift == 0 and state[IN_TX] == 0:
                state[ERROR], state[ERROR_OFFSET] = NOT_IN_TX, p
                return MALFORMED
            rel = _u32(buf, p + 1 + shift)
        elif shift != 0 and (c == BEGIN or c == COMMIT):
            state[ERROR], state[ERROR_OFFSET] = BEGIN_IN_BLOCK if c == BEGIN else COMMIT_IN_BLOCK, p
            return MALFORMED
        elif c == BEGIN:
            if left < 21:
                state[ERROR], state[ERROR_OFFSET] = SHORT, p
                return MALFORMED
            if state[IN_TX] != 0:
                state[ERROR], state[ERROR_OFFSET] = BEGIN_IN_TX, p
                return MALFORMED
            tx_commit[t] = _u64(buf, p + 1)
            tx_time[t] = np.int64(_u64(buf, p + 9))
            tx_xid[t] = np.uint32(_u32(buf, p + 17))
            tx_begin[t] = first_position + k
            state[IN_TX] = 1
        elif c == COMMIT:
            if left < 26:
                state[ERROR], state[ERROR_OFFSET] = SHORT, p
                return MALFORMED
            if state[IN_TX] == 0:
                state[ERROR], state[ERROR_OFFSET] = COMMIT_OUTSIDE, p
                return MALFORMED
            if _u64(buf, p + 2) != tx_commit[t]:
                state[ERROR], state[ERROR_OFFSET] = COMMIT_OF_ANOTHER, p
                return MALFORMED
            tx_end[t] = _u64(buf, p + 10)
            tx_last[t] = first_position + k
            state[IN_TX] = 0
            state[TX_COUNT] = t + 1
            state[LAST_COMMIT_TX] = t + 1
            state[LAST_COMMIT_END] = stop
        elif c == TRUNCATE:
            if left < 6:
                state[ERROR], state[ERROR_OFFSET] = SHORT, p
                return MALFORMED
            if shift == 0 and state[IN_TX] == 0:
                state[ERROR], state[ERROR_OFFSET] = NOT_IN_TX, p
                return MALFORMED
        elif c == RELATION:
            if left < 8:
                state[ERROR], state[ERROR_OFFSET] = SHORT, p
                return MALFORMED
            rel = _u32(buf, p + 1 + shift)
        elif not (c == TYPE or c == ORIGIN or c == MESSAGE):
            state[ERROR], state[ERROR_OFFSET] = UNKNOWN_KIND, p
            return MALFORMED
        elif shift != 0:
            pos = stop
            continue
        kind[k] = c
        off[k] = p + shift
        end[k] = stop
        relid[k] = rel
        tx[k] = t if shift == 0 else _u32(buf, p + 1)
        k += 1
        pos = stop
    state[CONSUMED] = pos
    state[COUNT] = k
    return OK


@njit("int64(uint8[::1], int64)", cache=True, nogil=True)
def until_streaming(buf: Any, first: Any) -> Any:
    """Where the next message about a transaction in progress (Stream Start, Stop, Commit, Abort) begins, from byte `first`
    on; the end of the bytes if there is none, or if they are malformed: whoever scans them says so."""
    pos = first
    used = buf.shape[0]
    while used - pos > FRAME_HEADER + XLOG_DATA_HEADER:
        size = _u32(buf, pos + 1)
        stop = pos + 1 + size
        if buf[pos] != COPY_DATA or size < 5 or stop > used:
            return used
        if buf[pos + FRAME_HEADER] == XLOG_DATA and size > 4 + XLOG_DATA_HEADER:
            c = buf[pos + FRAME_HEADER + XLOG_DATA_HEADER]
            if c == STREAM_START or c == STREAM_STOP or c == STREAM_COMMIT or c == STREAM_ABORT:
                return pos
        pos = stop
    return used


@njit("int64(int64[::1], int64, int64)", cache=True, nogil=True)
def tail_of(xid: Any, count: Any, first: Any) -> Any:
    """How many of the first `count` xids are left without the tail of those at or past `first`, as xids are compared."""
    while count > 0 and ((xid[count - 1] - first) & 0xFFFFFFFF) < 0x80000000:
        count -= 1
    return count


@njit("boolean(uint8[::1], int64[::1])", cache=True, nogil=True)
def any_old(buf: Any, off: Any) -> Any:
    """Whether any of these row messages carries an old tuple."""
    for i in range(off.shape[0]):
        c = buf[off[i] + 5]
        if c == OLD_KEY or c == OLD_FULL:
            return True
    return False


@njit(cache=True, nogil=True)
def _tuple(buf: Any, p: int, stop: int, i: int, ncols: int, foff: Any, flen: Any, fmt: Any) -> Any:
    """Fields of one TupleData at p; returns where it ends, or minus the offset of what is malformed."""
    if stop - p < 2:
        return -p
    if _i16(buf, p) != ncols:
        return -p
    p += 2
    for c in range(ncols):
        if stop - p < 1:
            return -p
        kd = buf[p]
        p += 1
        if kd == FIELD_NULL:
            flen[c, i] = IS_NULL
        elif kd == FIELD_UNCHANGED:
            flen[c, i] = IS_UNCHANGED
        elif kd == FIELD_BINARY or kd == FIELD_TEXT:
            if stop - p < 4:
                return -p
            size = _i32(buf, p)
            p += 4
            if size < 0 or size > stop - p:
                return -(p - 4)
            if fmt[c] == 0:
                fmt[c] = kd
            elif fmt[c] != kd:
                return -(p - 5)
            foff[c, i] = p
            flen[c, i] = size
            p += size
        else:
            return -(p - 1)
    return p


@njit(
    "int64(uint8[::1], int64[::1], int64[::1], uint8[::1], int64, int64[:,::1], int64[:,::1], int64[:,::1], int64[:,::1],"
    "uint8[::1], uint8[::1])",
    cache=True,
    nogil=True,
)
def row_fields(
    buf: Any,
    off: Any,
    end: Any,
    kind: Any,
    ncols: Any,
    new_off: Any,
    new_len: Any,
    old_off: Any,
    old_len: Any,
    old_kind: Any,
    fmt: Any,
) -> Any:
    """Where each field of each row message lies. Returns WELL_FORMED, or where
    the bytes are malformed. `old_*` may have no columns when no message has an old tuple."""
    for i in range(off.shape[0]):
        p = off[i] + 5
        stop = end[i]
        c = buf[p]
        old_kind[i] = 0
        if kind[i] == INSERT and c != NEW_ROW:
            return p
        if c == OLD_KEY or c == OLD_FULL:
            old_kind[i] = c
            p = _tuple(buf, p + 1, stop, i, ncols, old_off, old_len, fmt)
            if p < 0:
                return -p
            if kind[i] == UPDATE:
                if stop - p < 1 or buf[p] != NEW_ROW:
                    return p
                c = buf[p]
        elif c == NEW_ROW and kind[i] != DELETE:
            for j in range(old_len.shape[0]):
                old_len[j, i] = NO_TUPLE
        else:
            return p
        if kind[i] == DELETE:
            for j in range(ncols):
                new_len[j, i] = NO_TUPLE
        else:
            p = _tuple(buf, p + 1, stop, i, ncols, new_off, new_len, fmt)
            if p < 0:
                return -p
        if p != stop:
            return p
    return WELL_FORMED
