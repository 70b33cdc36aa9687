"""Values that a batch refers to but does not hold: from the target, else from the source (invariant 12).

If neither has the row, its value is not NULL. And a row that the source has under this key now may be another one: it is newer
than the batch. It is the right row if the batch's last change of it was made by the transaction that wrote it. Else the stream is
read up to the moment of the read, and the batch comes again with what followed: then its last change of each key is as old as
the read, unless a row took its key later still, which the read has not seen; then the source is read once more.

If a later run of the batch has a change of the key, that change decides: until then the row does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import functions

from headwater.destinations.iceberg.keys import encode_rows
from headwater.destinations.iceberg.names import source_schema
from headwater.destinations.iceberg.net import NetChanges, Pending, net_changes
from headwater.destinations.iceberg.refuse import refused, value_is_gone
from headwater.destinations.iceberg.sessions import LakeSession
from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.types import lake_arrow_schema, quote, spark_schema, to_lake
from headwater.errors import ChangeRefused, HeadwaterError, Meaning, meaning
from headwater.events import ChangeRun, EventBatch, SourceRead
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema, TableName
from headwater.spark.frames import FrameSpool

Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Xids = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Target:
    """A lake table at the snapshot that was looked at."""

    table: LakeTable
    start: int


@dataclass(frozen=True, slots=True)
class MissingValues:
    """Completes net changes before they are merged. `counted` is called with the number of rows read from the source."""

    spool: FrameSpool
    read_source_rows: Callable[[ReplicatedTableSchema, pa.Table], SourceRead]
    counted: Callable[[int], None]

    def complete(
        self,
        session: LakeSession,
        target: Target | None,
        run: ChangeRun,
        events: EventBatch,
        later: Sequence[ChangeRun] = (),
    ) -> NetChanges:
        """What the run amounts to, with nothing pending. No target: it counts as empty (after a truncate)."""
        schema = run.schema
        net = net_changes(run, schema.key)
        pending = net.pending
        if pending is None:
            return net
        names = list(pending.missing)
        found = np.zeros(len(pending.rows), np.bool_)
        upserts = net.upserts
        if target is not None and pending.in_target.any():
            wanted = np.flatnonzero(pending.in_target)
            keys = pending.origin.take(pa.array(wanted))
            there = self._read_target(session, target, schema, keys, names)
            where = _positions(keys, there, schema.key)
            upserts = _put(upserts, pending, wanted[where >= 0], there, where[where >= 0])
            found[wanted[where >= 0]] = True
        net = replace(net, upserts=upserts, pending=None)
        rest = np.flatnonzero(~found)
        if not len(rest):
            return net
        decided = _decided_later(upserts.select(schema.key).take(pa.array(pending.rows[rest])), schema.key, later)
        read = rest[~decided]
        if len(read):
            keys = upserts.select(schema.key).take(pa.array(pending.rows[read]))
            xids = events.transactions.xid[run.transaction]
            there, where = self._read_source(
                schema, keys, events, xids[pending.last[read]], xids[pending.arrived[read]]
            )
            net = replace(net, upserts=_put(upserts, pending, read, there, where))
        return _without(net, pending.rows[rest[decided]]) if decided.any() else net

    def count_in_target(
        self, session: LakeSession, target: Target, schema: ReplicatedTableSchema, rows: pa.Table
    ) -> int:
        """How many rows the target has of these rows' keys."""
        return int(self._read_target(session, target, schema, rows.select(schema.key), ()).num_rows)

    def _read_target(
        self,
        session: LakeSession,
        target: Target,
        schema: ReplicatedTableSchema,
        keys: pa.Table,
        names: Sequence[str],
    ) -> pa.Table:
        columns = [*schema.key, *(name for name in names if name not in schema.key)]
        lake = lake_arrow_schema(schema)
        with self.spool.frame(session.spark, keys, spark_schema(keys.schema)) as frame:
            # The snapshot whose watermark was looked at, and not whatever is current when the statement starts.
            staged = session.spark.table(target.table.stage(target.start))
            rows = (
                staged.select(*(functions.col(quote(name)) for name in columns))
                .join(functions.broadcast(frame.distinct()), on=list(schema.key), how="left_semi")
                .toArrow()
            )
        return rows.select(columns).cast(pa.schema([lake.field(name) for name in columns]))

    def _read_source(
        self, schema: ReplicatedTableSchema, keys: pa.Table, events: EventBatch, last: Xids, arrived: Xids
    ) -> tuple[pa.Table, Indexes]:
        """Rows of the source, and for each key which of them is the right row. ReadOn if that is not certain yet."""
        source = source_schema(schema)
        types = arrow_schema(source)
        wanted = keys.select(schema.key).rename_columns(source.key)
        wanted = wanted.cast(pa.schema([types.field(name) for name in source.key]))
        kept = events.reads.get(schema.id)
        if kept is not None and (kept.schema != source or (_positions(wanted, kept.keys, source.key) < 0).any()):
            kept = None
        read = self._read(source, wanted) if kept is None else kept
        if (_positions(read.rows, read.rows, source.key) != np.arange(read.rows.num_rows)).any():
            raise refused(source.name, "the source has two rows with one key")
        where = _positions(wanted, read.rows, source.key)
        certain = np.zeros(len(where), np.bool_)
        certain[where >= 0] = read.written_by[where[where >= 0]] == last[where >= 0]
        if read.position <= max(events.end_lsn, events.whole_until):
            certain |= read.snapshot.sees(arrived)
        if not certain.all():
            raise ReadOn(schema.name, self._read(source, wanted) if read is kept else read)
        if (where < 0).any():
            raise value_is_gone(schema.name, int(np.count_nonzero(where < 0)))
        lake = lake_arrow_schema(schema)
        return to_lake(read.rows.rename_columns(lake.names), lake), where

    def _read(self, source: ReplicatedTableSchema, keys: pa.Table) -> SourceRead:
        try:
            read = self.read_source_rows(source, keys)
        except HeadwaterError as error:
            if meaning(error) is not Meaning.TABLE:
                raise
            # Its name, columns or rights are not what they were when the change was made: no other table is concerned.
            raise refused(source.name, f"its rows cannot be read in the source: {error.summary}") from error
        self.counted(keys.num_rows)
        return read


class ReadOn(ChangeRefused):
    """Not before the stream has brought all that was committed until the read."""

    def __init__(self, name: TableName, read: SourceRead) -> None:
        super().__init__(
            f"a value of table {name} is not certain",
            detail="a changed row refers to an unchanged TOAST value that was not sent; the source was read, but too much was"
            " committed between the change and that read to decide whether it is the same row",
            hint="The table is copied again. If a row filter makes this common: REPLICA IDENTITY FULL sends such values.",
        )
        self.read = read

    def without_rows(self) -> ChangeRefused:
        """The message alone, for code that records errors: values stay out of logs and stores."""
        return ChangeRefused(self.message, detail=self.detail, hint=self.hint)


def _decided_later(keys: pa.Table, key: tuple[str, ...], later: Sequence[ChangeRun]) -> Flags:
    """Which of the keys a later run has a change of."""
    decided = np.zeros(keys.num_rows, np.bool_)
    for run in later:
        for changed in (run.new, run.old):
            if changed is not None and all(name in changed.column_names for name in key):
                decided |= _positions(keys, to_lake(changed.select(key), keys.schema), key) >= 0
    return decided


def _without(net: NetChanges, rows: Indexes) -> NetChanges:
    """These upserts as deletes."""
    keep = np.ones(net.upserts.num_rows, np.bool_)
    keep[rows] = False
    gone = net.upserts.select(net.deletes.column_names).take(pa.array(rows))
    return replace(
        net,
        deletes=pa.concat_tables([net.deletes, gone]),
        upserts=net.upserts.filter(pa.array(keep)),
        arrivals=None if net.arrivals is None else net.arrivals[keep],
    )


def _positions(keys: pa.Table, rows: pa.Table, key: tuple[str, ...]) -> Indexes:
    """For each key, which of the rows has it; -1 for none."""
    (wanted, there), count = encode_rows([keys, rows.select(key)], key)
    position = np.full(count, -1, np.int64)
    position[there] = np.arange(len(there))
    return position[wanted]


def _put(upserts: pa.Table, pending: Pending, which: Indexes, values: pa.Table, where: Indexes) -> pa.Table:
    """Set the missing columns of the pending rows `which` to those of the rows `where` of `values`."""
    for name, missing in pending.missing.items():
        use = missing[which]
        if not use.any():
            continue
        index = np.arange(upserts.num_rows)
        index[pending.rows[which[use]]] = upserts.num_rows + where[use]
        column = upserts.column(name)
        both = pa.chunked_array(column.chunks + values.column(name).chunks, type=column.type)
        upserts = upserts.set_column(
            upserts.column_names.index(name), upserts.schema.field(name), both.take(pa.array(index))
        )
    return upserts
