"""The stream of one replication connection, turned into batches of whole transactions as columns.

Bytes are collected as they come (`feed`) and decoded only when a batch is cut (`seal`), at the last commit seen. RELATION
is remembered per connection for every table, whichever worker owns it (invariant 7), and one that says nothing new splits no run.
Ordinals count a table's row and truncate messages within its transaction (invariant 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from headwater.changes import Step, StreamLeaf, StreamTruncate, Transactions, TruncateStep, joined
from headwater.errors import ProtocolError
from headwater.events import EventBatch
from headwater.lsn import ZERO, CommitLsn, EndLsn
from headwater.schema.table import ReplicatedTableSchema, TableId
from headwater.wire import kernels as k
from headwater.wire.columns import Bytes
from headwater.wire.letters import DELETE, INSERT, MESSAGE, ORIGIN, RELATION, TRUNCATE, TYPE, UPDATE
from headwater.wire.relation import RelationMessage, parse_relation, parse_truncate
from headwater.wire.runs import decode_run, on_disk
from headwater.wire.segment import Segment, StreamCommit, TransactionLog
from headwater.wire.spool import DiskBuffer, MemoryBudget, Spool
from headwater.wire.streamed import StreamedTransaction, StreamedTransactions

SEGMENT_BYTES = 64 << 20
"""A transaction larger than this is decoded in several pieces, so that no Arrow text column nears its 2 GiB limit."""

_ROWS = (INSERT, UPDATE, DELETE)
_OF_A_TABLE = (*_ROWS, RELATION)
_BETWEEN = (TYPE, ORIGIN, MESSAGE)
"""Types come before the relation that uses them."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """The answer to "whose are this table's changes?": decode them with this schema, from this position on."""

    schema: ReplicatedTableSchema
    from_lsn: EndLsn


class Mismatch(Enum):
    """The other answer: the RELATION is not that of the table's copy, so no schema fits the changes."""

    MISMATCH = "mismatch"


MISMATCH: Literal[Mismatch.MISMATCH] = Mismatch.MISMATCH
Answer = Ownership | Literal[Mismatch.MISMATCH] | None
"""None drops the changes, and so does MISMATCH, which puts the table into the batch's `changed`."""
Assign = Callable[[RelationMessage, CommitLsn], Answer]
"""Asked once per table and Relation version of a batch, with the first commit that concerns it."""


class PgOutputDecoder:
    """Holds what one connection has sent and not yet been cut into a batch. Used by one thread.

    With a `spool`, what goes beyond the budget is kept on disk: only large transactions get there, since batches are cut
    long before. A transaction that is sent while in progress is kept apart until it commits, and then takes its place.
    """

    def __init__(self, spool: Spool | None = None, budget: MemoryBudget | None = None) -> None:
        self._spool = spool
        self._budget = budget
        self._relations: dict[int, RelationMessage] = {}
        self._streamed = StreamedTransactions()
        self._state = np.zeros(k.STATE_SIZE, np.int64)
        self._transactions = TransactionLog()
        self._segments: list[Segment] = []
        self._positions = 0
        self._sealable = 0
        """How many segments hold commits: the last commit lies in segment number `_sealable` - 1."""
        self._begin_segment = True
        """Whether the next bytes need a segment of their own: the last one is a streamed transaction's."""

    @property
    def buffered_bytes(self) -> int:
        """What waits to be sealed; transactions that are still in progress do not count."""
        return sum(segment.used for segment in self._segments)

    @property
    def has_transactions(self) -> bool:
        return bool(self._state[k.LAST_COMMIT_TX])

    @property
    def in_transaction(self) -> bool:
        return bool(self._state[k.IN_TX])

    @property
    def idle_position(self) -> EndLsn | None:
        """The position the server has reached, when nothing before it is left to write: no open or waiting transaction.

        One that is sent in progress commits later than that, and is sent again as a whole if it has to be.
        """
        if self.has_transactions or self.in_transaction or not self._state[k.KEEPALIVE]:
            return None
        return EndLsn(int(self._state[k.KEEPALIVE]))

    @property
    def end_position(self) -> EndLsn | None:
        """The end of the last whole transaction that waits to be sealed."""
        done = int(self._state[k.LAST_COMMIT_TX])
        return EndLsn(int(self._transactions.end[done - 1])) if done else None

    @property
    def whole_until(self) -> EndLsn:
        """Every transaction that ends at or before it is here or was sealed; ZERO while that is not known."""
        end = self.end_position or ZERO
        return max(end, EndLsn(int(self._state[k.KEEPALIVE])))

    @property
    def received_position(self) -> EndLsn:
        return EndLsn(int(self._state[k.WAL_END]))

    def feed(self, data: Bytes) -> None:
        """Take whole CopyData frames, as the connection gives them."""
        at = 0
        while at < len(data):
            stop = int(k.until_streaming(data, at))
            if stop > at:
                self._take_in(data[at:stop])
            if stop == len(data):
                return
            if self.in_transaction:
                raise ProtocolError("message about a transaction in progress inside another one", offset=stop)
            at, commit, transaction = self._streamed.control(data, stop)
            if commit is not None and transaction is not None:
                self._committed(commit, transaction)

    def _take_in(self, data: Bytes) -> None:
        block = self._streamed.block
        if block is not None:
            block.append(data, self._state, self._transactions, self._block_segment)
        else:
            self._append(data)

    def _append(self, data: Bytes) -> None:
        if self._begin_segment or not self._segments[-1].has_room(len(data), SEGMENT_BYTES):
            self._segments.append(Segment(self._positions, self._buffer(len(data), self._segments)))
            self._begin_segment = False
        segment = self._segments[-1]
        segment.append(data)
        committed = int(self._state[k.LAST_COMMIT_TX])
        self._positions += segment.scan(self._state, self._transactions)
        if int(self._state[k.LAST_COMMIT_TX]) > committed:
            self._sealable = len(self._segments)
            segment.commit_end = int(self._state[k.LAST_COMMIT_END])

    def _committed(self, commit: StreamCommit, transaction: StreamedTransaction) -> None:
        """A transaction that came in blocks is whole: it stands where it commits, as if it had come at once."""
        index, begin = int(self._state[k.TX_COUNT]), self._positions
        segments = transaction.segments or [Segment(begin, in_block=True)]
        self._positions += 1
        for segment in segments:
            segment.belongs_to(index, self._positions)
            self._positions += segment.count
        self._transactions.add(index, commit, begin, self._positions)
        self._positions += 1
        self._state[k.TX_COUNT] = self._state[k.LAST_COMMIT_TX] = index + 1
        self._state[k.WAL_END] = max(int(self._state[k.WAL_END]), min(commit.end_lsn, 2**63 - 1))
        self._segments += segments
        self._sealable, self._begin_segment = len(self._segments), True

    def _block_segment(self, least: int, before: Sequence[Segment]) -> Segment:
        return Segment(0, self._buffer(least, before), in_block=True)

    def _buffer(self, least: int, before: Sequence[Segment]) -> DiskBuffer | None:
        """Where a new segment is to lie: in memory while the budget allows it. Those before it are full."""
        if self._spool is None or self._budget is None:
            return None
        if before:
            before[-1].close(self._spool)
        filled = [*self._segments, *self._streamed.segments]
        if self._budget.allows(self, sum(segment.memory_bytes for segment in filled)):
            return None
        # As large again as what there is: a thousand transactions of some megabytes need no more disk than that.
        size = min(max(sum(segment.used for segment in before), SEGMENT_BYTES // 16), SEGMENT_BYTES)
        return self._spool.buffer(max(size, least))

    def seal(self, assign: Assign) -> EventBatch | None:
        """Cut a batch at the last commit and decode it. What lies behind that commit stays for the next batch."""
        done = int(self._state[k.LAST_COMMIT_TX])
        if not done:
            return None
        transactions = self._transactions.head(done)
        # A copy: a batch that fails to decode may be sealed again, and must not meet its own later relations then.
        relations = dict(self._relations)
        whole = self._segments[: self._sealable]
        spool = self._spool if any(segment.on_disk for segment in whole) else None
        decoding = _Decoding(relations, transactions, assign, spool)
        size = 0
        for segment in whole:
            limit = segment.commit_end if segment is whole[-1] else segment.used
            decoding.add(segment, limit)
            segment.let_go()
            size += limit
        batch = EventBatch(
            decoding.tables(),
            transactions,
            EndLsn(int(transactions.end_lsn[-1])),
            size,
            truncates=decoding.truncates,
            leaves=decoding.leaves,
            changed=frozenset(decoding.changed),
        )
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
        self._segments, self._positions, self._sealable, self._begin_segment = [], 0, 0, True
        for data in rest:
            if len(data):
                self._append(data)


class _Decoding:
    """One batch being decoded: steps per table, in order."""

    def __init__(
        self, relations: dict[int, RelationMessage], transactions: Transactions, assign: Assign, spool: Spool | None
    ) -> None:
        self._spool = spool
        self._relations = relations
        self._transactions = transactions
        self._assign = assign
        self._owners: dict[RelationMessage, Ownership | None] = {}
        self._steps: dict[TableId, list[Step]] = {}
        self._ordinals: dict[int, tuple[int, int]] = {}
        """For each table the last transaction seen and how many of its messages were counted, across segments."""
        self.truncates: list[StreamTruncate] = []
        self.leaves: list[StreamLeaf] = []
        self.changed: set[TableId] = set()
        self._relations_before: list[tuple[int, bytes]] = []
        """Table and text of the RELATION messages that nothing has followed yet, in an earlier segment perhaps."""

    def tables(self) -> dict[TableId, Sequence[Step]]:
        together = self._spool.concatenate if self._spool is not None else np.concatenate
        return {table: joined(steps, together) for table, steps in sorted(self._steps.items())}

    def add(self, segment: Segment, limit: int) -> None:
        count = segment.count_until(limit)
        kind, relid = segment.kind[:count], segment.relid[:count]
        truncates = self._truncates(segment, np.flatnonzero(kind == TRUNCATE))
        # One line per (table, message): rows and relations as they are, a truncate once for each table it names.
        plain = np.flatnonzero(np.isin(kind, _OF_A_TABLE))
        lines = np.concatenate([plain, np.array([t.message for t in truncates], np.int64)])
        tables = np.concatenate([relid[plain], np.array([t.table for t in truncates], np.int64)])
        which = np.concatenate([np.full(len(plain), -1), np.arange(len(truncates))])
        self._find_leaves(segment, count)
        if not len(tables):
            return  # transactions without a change: messages alone, or what a server before 15 sends for every commit
        order = np.lexsort((lines, tables))
        lines, tables, which = lines[order], tables[order], which[order]
        bounds = np.flatnonzero(np.r_[True, tables[1:] != tables[:-1], True])
        for start, stop in itertools.pairwise(bounds.tolist()):
            self._table(int(tables[start]), segment, lines[start:stop], which[start:stop], truncates)

    def _find_leaves(self, segment: Segment, count: int) -> None:
        """A root, then a leaf, then a row of the root. Before a TRUNCATE of several tables there is a RELATION of each, too."""
        messages = np.flatnonzero(~np.isin(segment.kind[:count], _BETWEEN))
        kind, relid = segment.kind[messages], segment.relid[messages]
        is_relation = kind == RELATION
        # Relations, and what comes right behind one; of all others nothing has to be looked at.
        behind = np.r_[bool(self._relations_before), is_relation[:-1]] if len(messages) else is_relation
        for at in np.flatnonzero(is_relation | behind).tolist():
            message = int(messages[at])
            if is_relation[at]:
                start, stop = int(segment.off[message]), int(segment.end[message])
                self._relations_before.append((int(relid[at]), segment.data[start:stop].tobytes()))
                continue
            before, self._relations_before = self._relations_before, []
            if kind[at] in _ROWS and len(before) > 1 and before[-2][0] == relid[at] != before[-1][0]:
                commit = CommitLsn(int(self._transactions.commit_lsn[int(segment.tx[message])]))
                leaf = parse_relation(before[-1][1], 0)
                root = TableId(int(relid[at]))
                self.leaves.append(
                    StreamLeaf(root, leaf.id, leaf.name.name, leaf.replica_identity, leaf.flagged, commit)
                )

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
        ordinal = self._count(table, segment.tx[lines], kinds != RELATION)
        begin = 0
        for at in np.flatnonzero((kinds == RELATION) | (which >= 0)).tolist():
            self._run(table, segment, lines[begin:at], ordinal[begin:at])
            begin = at + 1
            message = int(lines[at])
            if kinds[at] == RELATION:
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
            answer = self._assign(relation, commit)
            if answer is MISMATCH:
                self.changed.add(relation.id)
                answer = None
            self._owners[relation] = answer
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
            step = on_disk(step, self._spool)
        self._steps.setdefault(TableId(table), []).append(step)

    def _truncate(self, table: int, segment: Segment, line: _TruncateLine, ordinal: int) -> None:
        tx = int(segment.tx[line.message])
        commit = CommitLsn(int(self._transactions.commit_lsn[tx]))
        self.truncates.append(StreamTruncate(TableId(table), int(self._transactions.xid[tx]), commit))
        owner = self._owner(table, tx)
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
