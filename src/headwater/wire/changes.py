"""Changes as columns: what the decoder makes of a stream, before anybody looks at a single row.

A run is changes of one table under one schema version; a truncate stands between runs. All arrays of a run have one element
per change. What the rows mean to a person (`Event`) is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.lsn import CommitLsn, EndLsn
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.wire.relation import Relation

NO_OLD = 0


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
class ToldTruncate:
    """A table of a TRUNCATE message, whoever owns it."""

    table_id: TableId
    xid: int
    commit_lsn: CommitLsn


@dataclass(frozen=True, slots=True)
class ToldLeaf:
    """A RELATION between that of a root and a row of the root: the leaf that the row lies in.

    It has the identity that the leaf's old tuples are shaped by.
    """

    root_id: TableId
    relation: Relation
    commit_lsn: CommitLsn


@dataclass(frozen=True, slots=True)
class Changes:
    """Whole transactions, by table. `end_lsn` is what may be confirmed once all of it is durable."""

    tables: Mapping[TableId, Sequence[Step]]
    transactions: Transactions
    end_lsn: EndLsn
    size_bytes: int = 0
    truncates: Sequence[ToldTruncate] = ()
    leaves: Sequence[ToldLeaf] = ()
