"""Which changes a writer accepts, and which it refuses because no source sends them (invariant 18).

A replica identity that differs from the schema shows here first: as an old tuple without its key, or as a change that a
table without an identity cannot have. Pure; no value of a row is shown.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import ChangeRefused
from headwater.events import DELETE, INSERT, NO_OLD, OLD_FULL, UPDATE, ChangeRun
from headwater.schema.table import TableName

MERGE_TAKES = (INSERT, UPDATE, DELETE)
DELTA_TAKES = (INSERT, UPDATE, DELETE)
APPEND_TAKES = (INSERT,)
Flags = npt.NDArray[np.bool_]


def checked(run: ChangeRun) -> ChangeRun:
    """The run, if it may be written; ChangeRefused if not."""
    schema = run.schema
    name = schema.name
    if schema.key:
        _takes(run, MERGE_TAKES, name)
        _check_keys(run, schema.key, name)
    elif schema.insert_only:
        _takes(run, APPEND_TAKES, name)
        refuse_gaps(run)
    else:
        _takes(run, DELTA_TAKES, name)
        if ((run.op != INSERT) & (run.old_kind != OLD_FULL)).any():
            raise refused(name, "an UPDATE or DELETE came without the whole old row, which is this table's only key")
    return run


def refused(name: TableName | str, detail: str) -> ChangeRefused:
    return ChangeRefused(
        f"a change of table {name} cannot be applied",
        detail=detail,
        hint="The table is copied again. If this repeats, compare the replica identities of the table and its partitions.",
    )


def value_is_gone(name: TableName | str, count: int) -> ChangeRefused:
    rows = "row refers" if count == 1 else "rows refer"
    return ChangeRefused(
        f"a value of table {name} cannot be found",
        detail=f"{count} changed {rows} to an unchanged TOAST value, which is not sent, and neither lake nor source has the row",
        hint="The table is copied again. If a row filter makes this common: REPLICA IDENTITY FULL sends such values.",
    )


def refuse_gaps(run: ChangeRun) -> None:
    """Without a key there is no other place to look for a value that was not sent."""
    gaps = sum(int(np.count_nonzero(flags)) for flags in run.unchanged.values())
    if gaps:
        raise value_is_gone(run.schema.name, gaps)


def _takes(run: ChangeRun, operations: tuple[int, ...], name: TableName) -> None:
    if not np.isin(run.op, operations).all():
        raise refused(
            name, "the table has no replica identity, so only INSERT and TRUNCATE are possible; another change came"
        )


def _check_keys(run: ChangeRun, key: tuple[str, ...], name: TableName) -> None:
    has_old = run.old_kind != NO_OLD
    if (has_old & (run.old is None)).any() or ((run.op == DELETE) & ~has_old).any():
        raise refused(name, "a DELETE or UPDATE came without the key of its old row")
    for column in key:
        if run.old is not None and (_nulls(run.old, column) & has_old).any():
            raise refused(name, f'an old row came without its key: column "{column}" is NULL')
        unchanged = run.unchanged.get(column, np.zeros(len(run), np.bool_))
        lacks = _nulls(run.new, column) & ~unchanged | unchanged & ~has_old
        if (lacks & (run.op != DELETE)).any():
            raise refused(name, f'a row came without its key: column "{column}" is NULL')


def _nulls(rows: pa.Table, column: str) -> Flags:
    values = rows.column(column)
    if not values.null_count:
        return np.zeros(len(values), np.bool_)
    nulls: Flags = pc.is_null(values).to_numpy()
    return nulls
