"""The stream of one replication connection, turned into batches of whole transactions as columns.

Bytes are collected as they come (`feed`) and decoded only when a batch is cut (`seal`), at the last commit seen. RELATION
is remembered per connection for every table, whoever owns it (invariant 7), and one that says nothing new splits nothing.
Ordinals count a table's row and truncate messages within its transaction (invariant 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headwater.errors import ProtocolError
from headwater.lsn import CommitLsn, EndLsn
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.wire import kernels as k
from headwater.wire.changes import Changes, Step, Transactions, TruncateStep
from headwater.wire.columns import Bytes
from headwater.wire.relation import Relation, parse_relation, parse_truncate
from headwater.wire.runs import decode_run, joined
from headwater.wire.segment import Segment, TransactionLog
from headwater.wire.spool import Spool

SEGMENT_BYTES = 64 << 20
"""A transaction larger than this is decoded in several pieces, so that no Arrow text column nears its 2 GiB limit."""

_RELATION, _TRUNCATE = ord("R"), ord("T")
_OF_A_TABLE = (ord("I"), ord("U"), ord("D"), _RELATION)


@dataclass(frozen=True, slots=True)
class Ownership:
    """The answer to "whose are this table's changes?": decode them with this schema, from this position on."""

    schema: ReplicatedTableSchema
    from_lsn: EndLsn


Assign = Callable[[Relation, CommitLsn], Ownership | None]
"""Asked once per table and Relation version of a batch, with the first commit that concerns it; None drops the changes."""


class PgOutputDecoder:
    """Holds what one connection has sent and not yet been cut into a batch. Used by one thread.

    With a `spool`, what goes beyond `memory_bytes` is kept on disk: only a transaction that large gets there, since batches
    are cut long before.
    """

    def __init__(self, spool: Spool | None = None, memory_bytes: int = 0) -> None:
        self._spool = spool
        self._memory_bytes = memory_bytes
        self._relations: dict[int, Relation] = {}
        self._state = np.zeros(k.STATE_SIZE, np.int64)
        self._transactions = TransactionLog()
        self._segments: list[Segment] = []
        self._positions = 0
        self._sealable = 0
        """How many segments hold commits: the last commit lies in segment number `_sealable` - 1."""

    @property
    def buffered_bytes(self) -> int:
        return sum(segment.used for segment in self._segments)

    @property
    def has_transactions(self) -> bool:
        return bool(self._state[k.LAST_COMMIT_TX])

    @property
    def in_transaction(self) -> bool:
        return bool(self._state[k.IN_TX])

    @property
    def idle_position(self) -> EndLsn | None:
        """The position the server has reached, when nothing before it is left to write: no open or waiting transaction."""
        if self.has_transactions or self.in_transaction or not self._state[k.KEEPALIVE]:
            return None
        return EndLsn(int(self._state[k.KEEPALIVE]))

    @property
    def end_position(self) -> EndLsn | None:
        """The end of the last whole transaction that waits to be sealed."""
        done = int(self._state[k.LAST_COMMIT_TX])
        return EndLsn(int(self._transactions.end[done - 1])) if done else None

    @property
    def received_position(self) -> EndLsn:
        return EndLsn(int(self._state[k.WAL_END]))

    def feed(self, data: Bytes) -> None:
        """Take whole CopyData frames, as the connection gives them."""
        if not self._segments or self._segments[-1].used + len(data) > max(SEGMENT_BYTES, len(data)):
            self._segments.append(Segment(self._positions, self._buffer(len(data))))
        segment = self._segments[-1]
        segment.append(data)
        before = int(self._state[k.LAST_COMMIT_TX])
        self._positions += segment.scan(self._state, self._transactions)
        if int(self._state[k.LAST_COMMIT_TX]) > before:
            self._sealable = len(self._segments)
            segment.commit_end = int(self._state[k.LAST_COMMIT_END])

    def _buffer(self, least: int) -> Bytes | None:
        if self._spool is None or self.buffered_bytes < self._memory_bytes:
            return None
        return self._spool.buffer(max(SEGMENT_BYTES, least))

    def seal(self, assign: Assign) -> Changes | None:
        """Cut a batch at the last commit and decode it. What lies behind that commit stays for the next batch."""
        done = int(self._state[k.LAST_COMMIT_TX])
        if not done:
            return None
        transactions = self._transactions.head(done)
        size = 0
        # A copy: a batch that fails to decode may be sealed again, and must not meet its own later relations then.
        relations = dict(self._relations)
        spool = self._spool if self.buffered_bytes >= self._memory_bytes else None
        decoding = _Decoding(relations, transactions, assign, spool)
        for segment in self._segments[: self._sealable]:
            is_last = segment is self._segments[self._sealable - 1]
            decoding.add(segment, segment.commit_end if is_last else segment.used)
            size += segment.commit_end if is_last else segment.used
        batch = Changes(decoding.tables(), transactions, EndLsn(int(transactions.end_lsn[-1])), size)
        self._relations = relations
        self._keep_rest()
        return batch

    def _keep_rest(self) -> None:
        last = self._segments[self._sealable - 1]
        rest = [
            last.data[last.commit_end : last.used].copy(),
            *(s.data[: s.used] for s in self._segments[self._sealable :]),
        ]
        wal_end = self._state[k.WAL_END]
        self._state = np.zeros(k.STATE_SIZE, np.int64)
        self._state[k.WAL_END] = wal_end
        self._transactions = TransactionLog()
        self._segments, self._positions, self._sealable = [], 0, 0
        for data in rest:
            if len(data):
                self.feed(data)


class _Decoding:
    """One batch being decoded: steps per table, in order."""

    def __init__(
        self, relations: dict[int, Relation], transactions: Transactions, assign: Assign, spool: Spool | None
    ) -> None:
        self._spool = spool
        self._relations = relations
        self._transactions = transactions
        self._assign = assign
        self._owners: dict[Relation, Ownership | None] = {}
        self._steps: dict[TableId, list[Step]] = {}
        self._ordinals: dict[int, tuple[int, int]] = {}
        """For each table the last transaction seen and how many of its messages were counted, across segments."""

    def tables(self) -> dict[TableId, Sequence[Step]]:
        return {table: joined(steps) for table, steps in self._steps.items() if steps}

    def add(self, segment: Segment, limit: int) -> None:
        count = segment.count_until(limit)
        kind, relid = segment.kind[:count], segment.relid[:count]
        truncates = self._truncates(segment, np.flatnonzero(kind == _TRUNCATE))
        # One line per (table, message): rows and relations as they are, a truncate once for each table it names.
        plain = np.flatnonzero(np.isin(kind, _OF_A_TABLE))
        lines = np.concatenate([plain, np.array([t.message for t in truncates], np.int64)])
        tables = np.concatenate([relid[plain], np.array([t.table for t in truncates], np.int64)])
        which = np.concatenate([np.full(len(plain), -1), np.arange(len(truncates))])
        if not len(tables):
            return  # transactions without a change: messages alone, or what a server before 15 sends for every commit
        order = np.lexsort((lines, tables))
        lines, tables, which = lines[order], tables[order], which[order]
        starts = np.flatnonzero(np.r_[True, tables[1:] != tables[:-1]])
        for start, stop in zip(starts, np.r_[starts[1:], len(tables)], strict=True):
            self._table(int(tables[start]), segment, lines[start:stop], which[start:stop], truncates)

    def _truncates(self, segment: Segment, messages: npt.NDArray[np.int64]) -> list[_TruncateLine]:
        result: list[_TruncateLine] = []
        for message in messages:
            start, stop = int(segment.off[message]), int(segment.end[message])
            tables, cascade, restart = parse_truncate(segment.data[start:stop].tobytes(), start)
            result.extend(_TruncateLine(int(message), table, cascade, restart) for table in dict.fromkeys(tables))
        return result

    def _table(
        self,
        table: int,
        segment: Segment,
        lines: npt.NDArray[np.int64],
        which: npt.NDArray[np.int64],
        truncates: list[_TruncateLine],
    ) -> None:
        kinds = segment.kind[lines]
        ordinal = self._count(table, segment.tx[lines], kinds != _RELATION)
        begin = 0
        for at in np.flatnonzero((kinds == _RELATION) | (which >= 0)).tolist():
            self._run(table, segment, lines[begin:at], ordinal[begin:at])
            begin = at + 1
            message = int(lines[at])
            if kinds[at] == _RELATION:
                start, stop = int(segment.off[message]), int(segment.end[message])
                self._relations[table] = parse_relation(segment.data[start:stop].tobytes(), start)
            else:
                self._truncate(table, segment, truncates[int(which[at])], int(ordinal[at]))
        self._run(table, segment, lines[begin:], ordinal[begin:])

    def _count(self, table: int, tx: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Ordinals of a table's messages: how many of them came before in the same transaction."""
        last_tx, base = self._ordinals.get(table, (-1, 0))
        before: npt.NDArray[np.int64] = np.cumsum(counted) - counted
        first = np.r_[True, tx[1:] != tx[:-1]]
        start_of = np.maximum.accumulate(np.where(first, np.arange(len(tx)), 0))
        within = before - before[start_of]
        ordinal: npt.NDArray[np.int64] = np.where(tx == last_tx, within + base, within)
        if len(tx):
            self._ordinals[table] = (int(tx[-1]), int(ordinal[-1]) + int(counted[-1]))
        return ordinal

    def _owner(self, table: int, tx: int) -> Ownership | None:
        relation = self._relations.get(table)
        if relation is None:
            raise ProtocolError(
                f"change of table {table} before its RELATION",
                detail="the server describes a table before its first change in a connection; this one was not",
            )
        if relation not in self._owners:
            commit = CommitLsn(int(self._transactions.commit_lsn[tx]))
            self._owners[relation] = self._assign(relation, commit)
        return self._owners[relation]

    def _run(
        self, table: int, segment: Segment, messages: npt.NDArray[np.int64], ordinal: npt.NDArray[np.int64]
    ) -> None:
        if not len(messages):
            return
        tx = segment.tx[messages]
        owner = self._owner(table, int(tx[0]))
        if owner is None:
            return
        commit_lsn = self._transactions.commit_lsn[tx]
        keep = commit_lsn >= np.uint64(owner.from_lsn.value)
        if not keep.all():
            messages, ordinal, tx, commit_lsn = messages[keep], ordinal[keep], tx[keep], commit_lsn[keep]
            if not len(messages):
                return
        step = decode_run(owner.schema, segment, messages, commit_lsn, ordinal, tx)
        if self._spool is not None:
            old = self._spool.table(step.old) if step.old is not None else None
            step = replace(step, new=self._spool.table(step.new), old=old)
        self._steps.setdefault(TableId(table), []).append(step)

    def _truncate(self, table: int, segment: Segment, line: _TruncateLine, ordinal: int) -> None:
        tx = int(segment.tx[line.message])
        owner = self._owner(table, tx)
        commit = CommitLsn(int(self._transactions.commit_lsn[tx]))
        if owner is None or not commit.at_or_past(owner.from_lsn):
            return
        position = segment.first_position + line.message
        step = TruncateStep(owner.schema, commit, ordinal, tx, position, line.cascade, line.restart_identity)
        self._steps.setdefault(TableId(table), []).append(step)


@dataclass(frozen=True, slots=True)
class _TruncateLine:
    message: int
    table: int
    cascade: bool
    restart_identity: bool
