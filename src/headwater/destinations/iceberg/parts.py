"""A run of millions of changes, taken apart by key, so that netting it needs the memory of a part and not of the whole.

Everything about a key lies in one part, in order, so netting each part is exact. A change that moves a row from one key to
another would tie two parts together; a run with such a change stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

from headwater.destinations.iceberg.net import NetChanges
from headwater.events import DELETE, NO_OLD, UPDATE, ChangeRun
from headwater.wire.spool import Spool

PART_CHANGES = 500_000
_MIX = np.uint64(0x9E3779B97F4A7C15)
Hashes = npt.NDArray[np.uint64]


def net_in_parts(
    run: ChangeRun, key: tuple[str, ...], spool: Spool, net: Callable[[ChangeRun], NetChanges]
) -> NetChanges:
    """What `net` makes of the run, part by part if it is a large one; the rows then lie on disk."""
    if len(run) <= PART_CHANGES:
        return net(run)
    deletes, upserts = [], []
    for part in by_key(run, key, -(-len(run) // PART_CHANGES)):
        found = net(part)
        assert found.pending is None
        deletes.append(spool.table(found.deletes))
        upserts.append(spool.table(found.upserts))
    # What netting needed was large, and an allocator would keep it for the next time.
    pa.default_memory_pool().release_unused()
    return NetChanges(pa.concat_tables(deletes), pa.concat_tables(upserts))


def by_key(run: ChangeRun, key: tuple[str, ...], count: int) -> Iterator[ChangeRun]:
    """The run in so many parts, each with all changes of its keys, in order; or as it is, if it cannot be taken apart."""
    part = _part_of_each(run, key, count)
    if part is None:
        yield run
        return
    for number in range(count):
        yield run.filter(part == number)


def _part_of_each(run: ChangeRun, key: tuple[str, ...], count: int) -> npt.NDArray[np.uint8] | None:
    # An unchanged key lies in the old row.
    new = None if any(name in run.unchanged for name in key) else _hashes(run.new, key)
    if new is None:
        return None
    part = _parts(new, count)
    if run.old is None:
        return part
    old = _hashes(run.old, key)
    assert old is not None
    old_part = _parts(old, count)
    moved = (run.op == UPDATE) & (run.old_kind != NO_OLD) & (old != new)
    if moved.any():
        return None
    return np.where(run.op == DELETE, old_part, part)


def _parts(hashes: Hashes, count: int) -> npt.NDArray[np.uint8]:
    # The high bits are the well mixed ones.
    return ((hashes >> np.uint64(32)) % np.uint64(count)).astype(np.uint8 if count < 256 else np.uint32)


def _hashes(rows: pa.Table, key: tuple[str, ...]) -> Hashes | None:
    """A number per row, equal for equal keys; None if a column's type has none."""
    total = np.zeros(rows.num_rows, np.uint64)
    for name in key:
        at = 0
        for chunk in rows.column(name).chunks:
            found = _column_hashes(chunk)
            if found is None:
                return None
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
        # -0.0 and 0.0 are one key to Postgres.
        plain = pc.add(pc.fill_null(values.cast(pa.float64()), 0.0), pa.scalar(0.0))
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
        _fnv(np.frombuffer(data, np.uint8), bounds, result)
    return result


@njit(nogil=True)
def _fnv(data: Any, bounds: Any, result: Any) -> None:
    for i in range(result.shape[0]):
        h = np.uint64(14695981039346656037)
        for j in range(bounds[i], bounds[i + 1]):
            h = (h ^ np.uint64(data[j])) * np.uint64(1099511628211)
        result[i] = h
