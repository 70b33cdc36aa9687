"""Row messages of one table, decoded into a run; and neighbouring runs joined into one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.errors import ProtocolError, ValueOutOfRange
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema
from headwater.wire import kernels as k
from headwater.wire.changes import ChangeRun, Step
from headwater.wire.columns import decode_column
from headwater.wire.segment import Segment


def decode_run(
    schema: ReplicatedTableSchema,
    segment: Segment,
    messages: npt.NDArray[np.int64],
    commit_lsn: npt.NDArray[np.uint64],
    ordinal: npt.NDArray[np.int64],
    tx: npt.NDArray[np.int64],
) -> ChangeRun:
    columns = schema.columns
    n, ncols = len(messages), len(columns)
    off, end, kind = segment.off[messages], segment.end[messages], segment.kind[messages]
    has_old = bool(k.any_old(segment.data, off))
    new_off, new_len = np.zeros((ncols, n), np.int64), np.empty((ncols, n), np.int64)
    old_shape = (ncols if has_old else 0, n)
    old_off, old_len = np.zeros(old_shape, np.int64), np.empty(old_shape, np.int64)
    old_kind, fmt = np.zeros(n, np.uint8), np.zeros(ncols, np.uint8)
    bad = k.row_fields(segment.data, off, end, kind, ncols, new_off, new_len, old_off, old_len, old_kind, fmt)
    if bad != -1:
        raise ProtocolError(
            f"malformed row of table {schema.name}",
            offset=int(bad),
            detail=f"at byte {bad}: expected a tuple of {ncols} columns",
        )
    names = [column.name for column in columns]
    try:
        new = _columns(schema, segment, new_off, new_len, fmt)
        old = _columns(schema, segment, old_off, old_len, fmt) if has_old else None
    except ValueOutOfRange as error:
        error.message = f"table {schema.name}: {error.message}"
        error.table_id = schema.id
        raise
    unchanged = {name: new_len[i] == -2 for i, name in enumerate(names) if (new_len[i] == -2).any()}
    return ChangeRun(
        schema=schema,
        op=kind,
        commit_lsn=commit_lsn,
        ordinal=ordinal,
        transaction=tx,
        position=segment.first_position + messages,
        new=new,
        old_kind=old_kind,
        old=old,
        unchanged=unchanged,
    )


def _columns(
    schema: ReplicatedTableSchema,
    segment: Segment,
    foff: npt.NDArray[np.int64],
    flen: npt.NDArray[np.int64],
    fmt: npt.NDArray[np.uint8],
) -> pa.Table:
    arrays = [decode_column(c, segment.data, foff[i], flen[i], int(fmt[i])) for i, c in enumerate(schema.columns)]
    return pa.table(arrays, schema=arrow_schema(schema))


def joined(steps: Sequence[Step]) -> Sequence[Step]:
    """Neighbouring runs of one schema become one: segments and repeated RELATIONs leave no trace."""
    result: list[Step] = []
    for step in steps:
        last = result[-1] if result else None
        if isinstance(step, ChangeRun) and isinstance(last, ChangeRun) and last.schema == step.schema:
            result[-1] = _concatenated(last, step)
        else:
            result.append(step)
    return result


def _concatenated(a: ChangeRun, b: ChangeRun) -> ChangeRun:
    old = None
    if a.old is not None or b.old is not None:
        old = pa.concat_tables([run.old if run.old is not None else _nulls(run) for run in (a, b)])
    names = [name for name in a.new.column_names if name in a.unchanged or name in b.unchanged]
    nothing_a, nothing_b = np.zeros(len(a), np.bool_), np.zeros(len(b), np.bool_)
    return ChangeRun(
        schema=a.schema,
        op=np.concatenate([a.op, b.op]),
        commit_lsn=np.concatenate([a.commit_lsn, b.commit_lsn]),
        ordinal=np.concatenate([a.ordinal, b.ordinal]),
        transaction=np.concatenate([a.transaction, b.transaction]),
        position=np.concatenate([a.position, b.position]),
        new=pa.concat_tables([a.new, b.new]),
        old_kind=np.concatenate([a.old_kind, b.old_kind]),
        old=old,
        unchanged={n: np.concatenate([a.unchanged.get(n, nothing_a), b.unchanged.get(n, nothing_b)]) for n in names},
    )


def _nulls(run: ChangeRun) -> pa.Table:
    return pa.table([pa.nulls(len(run), f.type) for f in run.new.schema], schema=run.new.schema)
