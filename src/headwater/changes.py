"""Changes as columns: what the decoder makes of a replication stream. No row is an object here; see `headwater.events`.

A run is changes of one table under one schema version; a truncate stands between runs. All arrays of a run have one element
per change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.lsn import CommitLsn
from headwater.schema.table import ReplicatedTableSchema, TableId

EPOCH_2000_SECONDS = 946_684_800
"""Postgres counts days and microseconds from 2000-01-01, Unix from 1970-01-01."""
# As the bytes of the protocol have them.
INSERT, UPDATE, DELETE = ord("I"), ord("U"), ord("D")
NO_OLD, OLD_KEY, OLD_FULL = 0, ord("K"), ord("O")


@dataclass(frozen=True, slots=True)
class Transactions:
    """The transactions of a batch, in commit order; one array element each."""

    commit_lsn: npt.NDArray[np.uint64]
    end_lsn: npt.NDArray[np.uint64]
    commit_time_us: npt.NDArray[np.int64]
    """Microseconds since 2000-01-01 UTC, as Postgres counts."""
    xid: npt.NDArray[np.uint32]
    begin_position: npt.NDArray[np.int64]
    commit_position: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.commit_lsn)

    def then(self, later: Transactions, positions: int) -> Transactions:
        """These and those of a later batch, whose messages are counted on from `positions`."""
        return Transactions(
            commit_lsn=np.concatenate([self.commit_lsn, later.commit_lsn]),
            end_lsn=np.concatenate([self.end_lsn, later.end_lsn]),
            commit_time_us=np.concatenate([self.commit_time_us, later.commit_time_us]),
            xid=np.concatenate([self.xid, later.xid]),
            begin_position=np.concatenate([self.begin_position, later.begin_position + positions]),
            commit_position=np.concatenate([self.commit_position, later.commit_position + positions]),
        )


@dataclass(frozen=True, slots=True)
class ChangeRun:
    """Changes of one table under one schema version, in order. All arrays have one element per change."""

    schema: ReplicatedTableSchema
    op: npt.NDArray[np.uint8]
    """INSERT, UPDATE or DELETE."""
    commit_lsn: npt.NDArray[np.uint64]
    ordinal: npt.NDArray[np.int64]
    transaction: npt.NDArray[np.int64]
    """Index into the batch's transactions."""
    position: npt.NDArray[np.int64]
    """Order among all messages of the batch; only the row-wise view needs it."""
    new: pa.Table
    """The replicated columns after the change; all NULL for a delete."""
    old_kind: npt.NDArray[np.uint8]
    """NO_OLD, OLD_KEY or OLD_FULL."""
    old: pa.Table | None = None
    """The same columns before the change, where the server sent them; None if no change of the run has any."""
    unchanged: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    """For columns that have them: where `new` holds no value because it did not change."""

    def __len__(self) -> int:
        return len(self.op)

    def moved(self, transactions: int, positions: int) -> ChangeRun:
        """The same changes in a batch that has so many transactions and messages before them."""
        return replace(self, transaction=self.transaction + transactions, position=self.position + positions)

    def filter(self, keep: npt.NDArray[np.bool_]) -> ChangeRun:
        mask = pa.array(keep)
        return ChangeRun(
            schema=self.schema,
            op=self.op[keep],
            commit_lsn=self.commit_lsn[keep],
            ordinal=self.ordinal[keep],
            transaction=self.transaction[keep],
            position=self.position[keep],
            new=self.new.filter(mask),
            old_kind=self.old_kind[keep],
            old=self.old.filter(mask) if self.old is not None else None,
            unchanged={name: flags[keep] for name, flags in self.unchanged.items()},
        )


@dataclass(frozen=True, slots=True)
class TruncateStep:
    schema: ReplicatedTableSchema
    commit_lsn: CommitLsn
    ordinal: int
    transaction: int
    position: int
    cascade: bool = False
    restart_identity: bool = False

    def moved(self, transactions: int, positions: int) -> TruncateStep:
        return replace(self, transaction=self.transaction + transactions, position=self.position + positions)


Step = ChangeRun | TruncateStep


@dataclass(frozen=True, slots=True)
class StreamTruncate:
    """A table of a TRUNCATE message, whoever owns it."""

    table_id: TableId
    xid: int
    commit_lsn: CommitLsn


@dataclass(frozen=True, slots=True)
class StreamLeaf:
    """A RELATION between that of a root and a row of the root: the leaf that the row lies in.

    It has the identity that the leaf's old tuples are shaped by.
    """

    root_id: TableId
    id: TableId
    name: str
    replica_identity: str
    flagged: frozenset[str]
    """The columns of its identity, as the message has them."""
    commit_lsn: CommitLsn


Concatenate = Callable[[Sequence[npt.NDArray[Any]]], npt.NDArray[Any]]
"""How arrays become one: in memory, or in a file (`wire.spool`)."""


def joined(steps: Sequence[Step], concatenate: Concatenate = np.concatenate) -> Sequence[Step]:
    """Neighbouring runs of one schema become one: segments and repeated RELATIONs cut nothing."""
    result: list[Step] = []
    alike: list[ChangeRun] = []
    for step in steps:
        if isinstance(step, ChangeRun) and (not alike or alike[0].schema == step.schema):
            alike.append(step)
            continue
        if alike:
            result.append(_concatenated(alike, concatenate))
        alike = [step] if isinstance(step, ChangeRun) else []
        if not alike:
            result.append(step)
    return [*result, _concatenated(alike, concatenate)] if alike else result


def _concatenated(runs: Sequence[ChangeRun], together: Concatenate) -> ChangeRun:
    if len(runs) == 1:
        return runs[0]
    old = None
    if any(run.old is not None for run in runs):
        old = pa.concat_tables([run.old if run.old is not None else _nulls(run) for run in runs])
    names = [name for name in runs[0].new.column_names if any(name in run.unchanged for run in runs)]
    return ChangeRun(
        schema=runs[0].schema,
        op=together([run.op for run in runs]),
        commit_lsn=together([run.commit_lsn for run in runs]),
        ordinal=together([run.ordinal for run in runs]),
        transaction=together([run.transaction for run in runs]),
        position=together([run.position for run in runs]),
        new=pa.concat_tables([run.new for run in runs]),
        old_kind=together([run.old_kind for run in runs]),
        old=old,
        unchanged={
            name: together([run.unchanged.get(name, np.zeros(len(run), np.bool_)) for run in runs]) for name in names
        },
    )


def _nulls(run: ChangeRun) -> pa.Table:
    return pa.table([pa.nulls(len(run), f.type) for f in run.new.schema], schema=run.new.schema)
