"""Row messages of one table, decoded into a run; and neighbouring runs joined into one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.changes import NO_OLD, ChangeRun
from headwater.errors import ProtocolError, ValueOutOfRange
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema
from headwater.wire import kernels as k
from headwater.wire.columns import decode_column
from headwater.wire.kernels import IS_UNCHANGED
from headwater.wire.letters import OLD_FULL, OLD_KEY
from headwater.wire.segment import Segment
from headwater.wire.spool import Spool

_WORTH_FILES_BYTES = 1 << 20


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
        raise error.for_table(schema.id, str(schema.name)) from None
    leaves = schema.table_schema.leaves
    if leaves is not None:
        # The server names the kind by the root's identity, and fills the tuple by the leaf's.
        old_kind = np.where(old_kind == NO_OLD, NO_OLD, OLD_FULL if leaves.old_is_full else OLD_KEY).astype(np.uint8)
    unchanged = {name: new_len[i] == IS_UNCHANGED for i, name in enumerate(names) if (new_len[i] == IS_UNCHANGED).any()}
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


def on_disk(run: ChangeRun, spool: Spool) -> ChangeRun:
    """The same run read from files, if it is worth them."""
    if run.new.nbytes < _WORTH_FILES_BYTES:
        return run
    return replace(
        run,
        op=spool.array(run.op),
        commit_lsn=spool.array(run.commit_lsn),
        ordinal=spool.array(run.ordinal),
        transaction=spool.array(run.transaction),
        position=spool.array(run.position),
        new=spool.table(run.new),
        old_kind=spool.array(run.old_kind),
        old=spool.table(run.old) if run.old is not None else None,
        unchanged={name: spool.array(flags) for name, flags in run.unchanged.items()},
    )
