"""Values that a batch refers to but does not hold: from the target, else from the source, else NULL (invariant 12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import functions

from headwater.destinations.iceberg.keys import encode_rows
from headwater.destinations.iceberg.net import NetChanges, Pending
from headwater.destinations.iceberg.sessions import LakeSession
from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.types import lake_arrow_schema, quote, spark_schema, to_lake
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema
from headwater.spark.frames import FrameSpool

Indexes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MissingValues:
    """Completes net changes before they are merged. `counted` is told how many rows were read from the source."""

    spool: FrameSpool
    read_source_rows: Callable[[ReplicatedTableSchema, pa.Table], pa.Table]
    counted: Callable[[int], None]

    def complete(
        self, session: LakeSession, table: LakeTable | None, schema: ReplicatedTableSchema, net: NetChanges
    ) -> NetChanges:
        """The same changes with nothing pending. No table: the target counts as empty (after a truncate)."""
        pending = net.pending
        if pending is None:
            return net
        names = list(pending.missing)
        found = np.zeros(len(pending.rows), np.bool_)
        upserts = net.upserts
        if table is not None and pending.in_target.any():
            wanted = np.flatnonzero(pending.in_target)
            keys = pending.origin.take(pa.array(wanted))
            there = self._read_target(session, table, schema, keys, names)
            where = _positions(keys, there, schema.key)
            upserts = _put(upserts, pending, wanted[where >= 0], there, where[where >= 0])
            found[wanted[where >= 0]] = True
        rest = np.flatnonzero(~found)
        if len(rest):
            keys = upserts.select(schema.key).take(pa.array(pending.rows[rest]))
            there = self._read_source(schema, keys)
            self.counted(len(rest))
            where = _positions(keys, there, schema.key)
            upserts = _put(upserts, pending, rest[where >= 0], there, where[where >= 0])
        return NetChanges(net.deletes, upserts)

    def _read_target(
        self,
        session: LakeSession,
        table: LakeTable,
        schema: ReplicatedTableSchema,
        keys: pa.Table,
        names: Sequence[str],
    ) -> pa.Table:
        columns = [*schema.key, *(name for name in names if name not in schema.key)]
        lake = lake_arrow_schema(schema)
        with self.spool.frame(session.spark, keys, spark_schema(keys.schema)) as frame:
            target = session.spark.table(table.identifier).select(*(functions.col(quote(name)) for name in columns))
            rows = target.join(functions.broadcast(frame.distinct()), on=list(schema.key), how="left_semi").toArrow()
        return rows.select(columns).cast(pa.schema([lake.field(name) for name in columns]))

    def _read_source(self, schema: ReplicatedTableSchema, keys: pa.Table) -> pa.Table:
        types = arrow_schema(schema)
        rows = self.read_source_rows(schema, keys.cast(pa.schema([types.field(name) for name in schema.key])))
        return to_lake(rows, lake_arrow_schema(schema))


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
