"""What a run amounts to where rows have no key: how many of each distinct row come and go. Columnar and pure, no Spark.

With REPLICA IDENTITY FULL and no primary key the whole row is its identity, and equal rows may exist. Deleting one of two equal
rows must leave one, so rows are counted instead of named.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.destinations.iceberg.keys import encode_rows
from headwater.destinations.iceberg.net import fill_from_old
from headwater.destinations.iceberg.refuse import refuse_gaps
from headwater.events import DELETE, NO_OLD, ChangeRun


@dataclass(frozen=True, slots=True)
class NetDelta:
    """`removed` holds each distinct row once, with its count beside it; `added` holds a row as often as it comes."""

    added: pa.Table
    removed: pa.Table
    removed_count: npt.NDArray[np.int64]


def net_delta(run: ChangeRun) -> NetDelta:
    if run.old is None:
        # Only what comes: nothing has to be copied.
        refuse_gaps(run)
        return NetDelta(run.new, run.new.slice(0, 0), np.zeros(0, np.int64))
    run = fill_from_old(run)
    refuse_gaps(run)
    assert run.old is not None
    added = run.new.take(pa.array(np.flatnonzero(run.op != DELETE)))
    return net_rows(added, run.old.take(pa.array(np.flatnonzero(run.old_kind != NO_OLD))))


def net_rows(added: pa.Table, removed: pa.Table) -> NetDelta:
    """The difference of two multisets of rows."""
    (added_code, removed_code), count = encode_rows([added, removed], added.column_names, zeros_differ=True)
    net = np.bincount(added_code, minlength=count) - np.bincount(removed_code, minlength=count)
    rows = pa.concat_tables([added, removed])
    example = np.zeros(count, np.int64)
    codes = np.concatenate([added_code, removed_code])
    example[codes] = np.arange(len(codes))
    coming, going = np.flatnonzero(net > 0), np.flatnonzero(net < 0)
    return NetDelta(
        added=rows.take(pa.array(np.repeat(example[coming], net[coming]))),
        removed=rows.take(pa.array(example[going])),
        removed_count=-net[going],
    )
