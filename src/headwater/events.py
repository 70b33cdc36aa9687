"""What the engine moves: whole transactions as columns, and a row-wise view of them for destinations that ask for it.

An `EventBatch` holds, for each table, an ordered list of steps: runs of changes under one schema version, with truncates
between them. Columns are Arrow arrays; nothing here makes a Python object per value until `EventBatch.events()` or
`TableRows.rows()` is called. Only whole transactions are in a batch (invariant 4).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.changes import (
    DELETE,
    EPOCH_2000_SECONDS,
    INSERT,
    NO_OLD,
    OLD_FULL,
    OLD_KEY,
    UPDATE,
    ChangeRun,
    Step,
    StreamLeaf,
    StreamTruncate,
    Transactions,
    TruncateStep,
    joined,
)
from headwater.lsn import ZERO, CommitLsn, EndLsn
from headwater.schema.table import ReplicatedTableSchema, TableId

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "DELETE",
    "INSERT",
    "NO_OLD",
    "OLD_FULL",
    "OLD_KEY",
    "UNCHANGED",
    "UPDATE",
    "Begin",
    "ChangeRun",
    "Commit",
    "Delete",
    "Event",
    "EventBatch",
    "Insert",
    "Relation",
    "SourceRead",
    "SourceSnapshot",
    "Step",
    "TableRow",
    "TableRows",
    "Transactions",
    "Truncate",
    "TruncateStep",
    "Update",
]

_EPOCH = datetime.fromtimestamp(EPOCH_2000_SECONDS, UTC)


class Unchanged(Enum):
    """The marker for a value that the server did not send because it did not change: not NULL (invariant 12)."""

    TOAST = "unchanged"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Literal[Unchanged.TOAST] = Unchanged.TOAST
TableRow = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    commit_lsn: CommitLsn
    commit_time: datetime
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    commit_lsn: CommitLsn
    end_lsn: EndLsn
    commit_time: datetime


@dataclass(frozen=True, slots=True)
class Relation:
    commit_lsn: CommitLsn
    schema: ReplicatedTableSchema


@dataclass(frozen=True, slots=True)
class Insert:
    commit_lsn: CommitLsn
    ordinal: int
    schema: ReplicatedTableSchema
    new: TableRow


@dataclass(frozen=True, slots=True)
class Update:
    """`old` is None unless the server sent it; with `old_is_key` only the key's columns of it are meaningful."""

    commit_lsn: CommitLsn
    ordinal: int
    schema: ReplicatedTableSchema
    new: TableRow
    old: TableRow | None
    old_is_key: bool


@dataclass(frozen=True, slots=True)
class Delete:
    commit_lsn: CommitLsn
    ordinal: int
    schema: ReplicatedTableSchema
    old: TableRow
    old_is_key: bool


@dataclass(frozen=True, slots=True)
class Truncate:
    commit_lsn: CommitLsn
    ordinal: int
    schema: ReplicatedTableSchema
    cascade: bool
    restart_identity: bool


Event = Begin | Commit | Relation | Insert | Update | Delete | Truncate


@dataclass(frozen=True, slots=True)
class SourceSnapshot:
    """Which transactions a read of the source has seen: those before `first_running`, and up to `next` those not in `running`."""

    first_running: int
    next: int
    running: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> SourceSnapshot:
        """As `pg_current_snapshot()` writes it."""
        first, next, running = text.split(":")
        return cls(int(first), int(next), frozenset(int(xid) for xid in running.split(",") if xid))

    def sees(self, xids: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """For the xids of Begin messages, which are the low half of those here: the nearest that has this half is meant."""
        offset = (xids.astype(np.int64) - (self.next & 0xFFFFFFFF) + 0x80000000) % 0x100000000 - 0x80000000
        whole = self.next + offset
        return (whole < self.next) & ~np.isin(whole, np.fromiter(self.running, np.int64, len(self.running)))


@dataclass(frozen=True, slots=True)
class SourceRead:
    """Rows as the source had them at one moment, which is later than the batch they were read for."""

    schema: ReplicatedTableSchema
    keys: pa.Table
    """What was asked for."""
    rows: pa.Table
    """What was there, all replicated columns."""
    written_by: npt.NDArray[np.uint32]
    """Per row, the transaction or subtransaction that wrote it."""
    snapshot: SourceSnapshot
    position: EndLsn
    """Every transaction that the rows show ends at or before it."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Whole transactions, by table. `end_lsn` is what may be confirmed once all of it is durable."""

    tables: Mapping[TableId, Sequence[Step]]
    transactions: Transactions
    end_lsn: EndLsn
    size_bytes: int = 0
    reads: Mapping[TableId, SourceRead] = field(default_factory=dict)
    """What a destination read in the source for this batch and could not use yet."""
    whole_until: EndLsn = ZERO
    """Where that is past `end_lsn`: nothing was committed between the two."""
    truncates: Sequence[StreamTruncate] = ()
    leaves: Sequence[StreamLeaf] = ()
    changed: frozenset[TableId] = frozenset()
    """Tables whose RELATION is not what was copied: their changes are not in the batch."""

    def without(self, tables: Collection[TableId]) -> EventBatch:
        """The same transactions, less the changes of some tables."""
        kept = {table: steps for table, steps in self.tables.items() if table not in tables}
        return replace(self, tables=kept)

    def read_on(self, reads: Mapping[TableId, SourceRead], whole_until: EndLsn) -> EventBatch:
        """The same batch, with what was read for it, and how far the stream was read since."""
        return replace(self, reads=reads, whole_until=whole_until)

    def then(self, later: EventBatch) -> EventBatch:
        """This batch and the one that followed it on the same stream, as one: a destination writes both at the price of one."""
        transactions, positions = len(self.transactions), int(self.transactions.commit_position[-1]) + 1
        tables = {table: list(steps) for table, steps in self.tables.items()}
        for table, steps in later.tables.items():
            tables.setdefault(table, []).extend(step.moved(transactions, positions) for step in steps)
        return EventBatch(
            {table: joined(steps) for table, steps in tables.items()},
            self.transactions.then(later.transactions, positions),
            later.end_lsn,
            self.size_bytes + later.size_bytes,
            {**self.reads, **later.reads},
        )

    @property
    def change_count(self) -> int:
        return sum(len(s) if isinstance(s, ChangeRun) else 1 for steps in self.tables.values() for s in steps)

    def events(self) -> Iterator[Event]:
        """Every event as an object, in the order in which the source sent them."""
        pending: list[tuple[int, Event]] = []
        for index in range(len(self.transactions)):
            pending.extend(_markers(self.transactions, index))
        for steps in self.tables.values():
            for step in steps:
                pending.extend(_step_events(step))
        pending.sort(key=lambda item: item[0])
        for _, event in pending:
            yield event


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of one table's copy. `start_lsn` is the slot's consistent point: changes at or past it are not in the rows.

    `dataframe` is a lazy Spark DataFrame that reads the source on the executors; `batches()` reads the same rows to the
    driver, a record batch at a time, for destinations that have no use for Spark. `epoch` names this copy: a later copy
    of the same table has another.
    """

    epoch: str
    start_lsn: EndLsn
    make_dataframe: Callable[[], DataFrame]
    batches: Callable[[], Iterator[pa.RecordBatch]]
    take_over: bool = False
    """The user allowed (`headwater resync --take-over`) that a table of this name in the destination is replaced, even one of
    another owner."""

    @property
    def dataframe(self) -> DataFrame:
        return self.make_dataframe()

    def rows(self) -> Iterator[TableRow]:
        for batch in self.batches():
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _time(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=int(microseconds))


def _markers(transactions: Transactions, index: int) -> Iterator[tuple[int, Event]]:
    lsn = CommitLsn(int(transactions.commit_lsn[index]))
    time = _time(transactions.commit_time_us[index])
    yield int(transactions.begin_position[index]), Begin(lsn, time, int(transactions.xid[index]))
    end = EndLsn(int(transactions.end_lsn[index]))
    yield int(transactions.commit_position[index]), Commit(lsn, end, time)


def _step_events(step: Step) -> Iterator[tuple[int, Event]]:
    if isinstance(step, TruncateStep):
        yield (
            step.position,
            Truncate(step.commit_lsn, step.ordinal, step.schema, step.cascade, step.restart_identity),
        )
        return
    new = _rows_with_markers(step)
    old = list(_table_rows(step.old)) if step.old is not None else [None] * len(step)
    for i, op in enumerate(step.op):
        lsn, ordinal = CommitLsn(int(step.commit_lsn[i])), int(step.ordinal[i])
        old_is_key = step.old_kind[i] == OLD_KEY
        before = old[i] if step.old_kind[i] != NO_OLD else None
        event: Event
        if op == INSERT:
            event = Insert(lsn, ordinal, step.schema, new[i])
        elif op == UPDATE:
            event = Update(lsn, ordinal, step.schema, new[i], before, bool(old_is_key))
        else:
            assert before is not None
            event = Delete(lsn, ordinal, step.schema, before, bool(old_is_key))
        yield int(step.position[i]), event


def _table_rows(table: pa.Table) -> Iterator[TableRow]:
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


def _rows_with_markers(run: ChangeRun) -> list[TableRow]:
    columns = []
    for name, column in zip(run.new.column_names, run.new.columns, strict=True):
        values = column.to_pylist()
        for i in np.flatnonzero(run.unchanged.get(name, np.zeros(0, np.bool_))):
            values[i] = UNCHANGED
        columns.append(values)
    return list(zip(*columns, strict=True))
