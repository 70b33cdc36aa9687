"""A run of millions of changes, taken apart by key, so that netting it needs the memory of a part and not of the whole.

Everything about a key lies in one part, in order, so netting each part is exact. A change that moves a row from one key to
another is a delete in the one's part and an insert in the other's; only if it leaves a large value unchanged, which then
lies with the old key, does the run stay whole. Rows without a key are counted, each part its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit, types

from headwater.destinations.iceberg.net import NetChanges, fill_from_old
from headwater.destinations.iceberg.net_delta import NetDelta, net_delta, net_rows
from headwater.destinations.iceberg.refuse import refuse_gaps
from headwater.events import DELETE, INSERT, NO_OLD, UPDATE, ChangeRun
from headwater.wire.spool import Spool, release_free_memory

PART_CHANGES = 500_000
_MIX = np.uint64(0x9E3779B97F4A7C15)
Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


def net_in_parts(
    run: ChangeRun, key: tuple[str, ...], spool: Spool, net: Callable[[ChangeRun], NetChanges]
) -> NetChanges:
    """What `net` makes of the run, part by part if it is a large one; the rows then lie on disk."""
    if len(run) <= PART_CHANGES:
        return net(run)
    deletes, upserts, arrivals, expected = [], [], [], 0
    for part in by_key(run, key, PART_CHANGES):
        found = net(part)
        assert found.pending is None
        deletes.append(spool.table(found.deletes))
        upserts.append(spool.table(found.upserts))
        arrivals.append(found.arrivals)
        expected += found.expected
        del part, found
        release_free_memory()
    flags = [part for part in arrivals if part is not None]
    return NetChanges(
        pa.concat_tables(deletes),
        pa.concat_tables(upserts),
        expected=expected,
        arrivals=np.concatenate(flags) if len(flags) == len(arrivals) else None,
    )


def by_key(run: ChangeRun, key: tuple[str, ...], size: int) -> Iterator[ChangeRun]:
    """The run in parts of about that size, each with all changes of its keys, in order; or as it is, if that cannot be."""
    new = _hashes(run.new, key)
    old = new if run.old is None else _hashes(run.old, key)
    # Equal hashes of two keys are equal parts: then netting sees the move itself.
    moved = (run.op == UPDATE) & (run.old_kind != NO_OLD) & (old != new)
    # An unchanged key lies in the old row.
    if any(name in run.unchanged for name in key) or any(flags[moved].any() for flags in run.unchanged.values()):
        yield run
        return
    # A move is two changes.
    count = -(-(len(run) + int(np.count_nonzero(moved))) // size)
    goes_to, left = _parts(new, count), _parts(old, count)
    del new, old
    goes_to = np.where(run.op == DELETE, left, goes_to)
    for number in range(count):
        goes = goes_to == number
        yield _with_moves(run, key, goes, moved & (left == number), moved) if moved.any() else run.filter(goes)


def _with_moves(run: ChangeRun, key: tuple[str, ...], goes: Flags, leaves: Flags, moved: Flags) -> ChangeRun:
    """Changes that stay as they are, and of those that moved a row what concerns the one key or the other."""
    index = np.concatenate([np.flatnonzero(leaves), np.flatnonzero(goes)])
    is_leaving = np.arange(len(index)) < np.count_nonzero(leaves)
    order = np.argsort(index, kind="stable")  # of one change, the delete first
    index, is_leaving = index[order], is_leaving[order]
    is_coming = moved[index] & ~is_leaving
    old_kind = np.where(is_coming, NO_OLD, run.old_kind[index]).astype(np.uint8)
    # Values that are not used are not kept: those of a row that leaves, and old ones beside the key.
    rows, old_rows = pa.array(index, mask=is_leaving), pa.array(index, mask=old_kind == NO_OLD)
    assert run.old is not None, "nothing moves without an old key"
    old = run.old if run.unchanged else run.old.select(key)
    return replace(
        run,
        op=np.where(is_leaving, DELETE, np.where(is_coming, INSERT, run.op[index])).astype(np.uint8),
        commit_lsn=run.commit_lsn[index],
        ordinal=run.ordinal[index],
        transaction=run.transaction[index],
        position=run.position[index],
        new=run.new.take(rows),
        old_kind=old_kind,
        old=old.take(old_rows),
        unchanged={name: flags[index] & ~is_leaving for name, flags in run.unchanged.items()},
    )


def delta_in_parts(run: ChangeRun, spool: Spool) -> NetDelta:
    """What `net_delta` makes of the run, part by part if it is a large one; the rows then lie on disk."""
    if len(run) <= PART_CHANGES or run.old is None:
        return net_delta(run)
    run = _filled_on_disk(run, spool)
    assert run.old is not None
    has_new, has_old = run.op != DELETE, run.old_kind != NO_OLD
    count = -(-int(np.count_nonzero(has_new) + np.count_nonzero(has_old)) // PART_CHANGES)
    new, old = (_parts(_hashes(rows, rows.column_names), count) for rows in (run.new, run.old))
    added, removed, counts = [], [], []
    for number in range(count):
        comes, goes = np.flatnonzero(has_new & (new == number)), np.flatnonzero(has_old & (old == number))
        found = net_rows(run.new.take(pa.array(comes)), run.old.take(pa.array(goes)))
        added.append(spool.table(found.added))
        removed.append(spool.table(found.removed))
        counts.append(found.removed_count)
        del found
        release_free_memory()
    return NetDelta(pa.concat_tables(added), pa.concat_tables(removed), np.concatenate(counts))


def _filled_on_disk(run: ChangeRun, spool: Spool) -> ChangeRun:
    """Unchanged values taken from the old rows, a stretch at a time."""
    if not run.unchanged:
        return run
    filled = []
    for start in range(0, len(run), PART_CHANGES):
        stretch = run.filter((np.arange(len(run)) >= start) & (np.arange(len(run)) < start + PART_CHANGES))
        stretch = fill_from_old(stretch)
        refuse_gaps(stretch)
        filled.append(spool.table(stretch.new))
    return replace(run, new=pa.concat_tables(filled), unchanged={})


def _parts(hashes: Hashes, count: int) -> npt.NDArray[np.uint8]:
    # The high bits are the well mixed ones.
    return ((hashes >> np.uint64(32)) % np.uint64(count)).astype(np.uint8 if count < 256 else np.uint32)


def _hashes(rows: pa.Table, columns: Sequence[str]) -> Hashes:
    """A number per row, equal for equal rows. A column whose type has no hash here does not count."""
    total = np.zeros(rows.num_rows, np.uint64)
    for name in columns:
        at = 0
        for chunk in rows.column(name).chunks:
            found = _column_hashes(chunk)
            if found is None:
                break
            here = total[at : at + len(chunk)]
            here += found
            here *= _MIX
            here ^= here >> np.uint64(29)
            at += len(chunk)
    return total


def _column_hashes(values: pa.Array) -> Hashes | None:
    type = values.type
    if pa.types.is_string(type) or pa.types.is_binary(type):
        return _bytes_hashes(values)
    if pa.types.is_floating(type):
        # To Postgres -0.0 and 0.0 are one key, and so are all bit patterns of NaN.
        plain = pc.add(pc.fill_null(values.cast(pa.float64()), 0.0), pa.scalar(0.0))
        plain = pc.if_else(pc.is_nan(plain), pa.scalar(math.nan), plain)
        return np.ascontiguousarray(plain.to_numpy(zero_copy_only=False)).view(np.uint64)
    if pa.types.is_decimal(type):
        return _bytes_hashes(values.cast(pa.string()))
    if pa.types.is_temporal(type):
        width = pa.int32() if type.bit_width == 32 else pa.int64()
        values = values.view(width)
    elif not (pa.types.is_integer(type) or pa.types.is_boolean(type)):
        return None
    numbers = pc.fill_null(values.cast(pa.int64()), 0)
    return np.ascontiguousarray(numbers.to_numpy(zero_copy_only=False)).view(np.uint64) * _MIX


def _bytes_hashes(values: pa.Array) -> Hashes:
    result = np.zeros(len(values), np.uint64)
    _, offsets, data = values.buffers()
    if data is not None and len(values):
        bounds = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
        fnv(np.frombuffer(data, np.uint8), bounds, result)
    return result


# Buffers of Arrow are read only. With the types given it is compiled at the import, and kept: not once in every process.
@njit(
    types.void(
        types.Array(types.uint8, 1, "C", readonly=True),
        types.Array(types.int32, 1, "C", readonly=True),
        types.uint64[::1],
    ),
    cache=True,
    nogil=True,
)
def fnv(data: Any, bounds: Any, result: Any) -> None:
    for i in range(result.shape[0]):
        h = np.uint64(14695981039346656037)
        for j in range(bounds[i], bounds[i + 1]):
            h = (h ^ np.uint64(data[j])) * np.uint64(1099511628211)
        result[i] = h
