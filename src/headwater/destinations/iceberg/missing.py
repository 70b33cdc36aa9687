"""Values that a batch refers to but does not hold: from the target, else from the source (invariant 12).

A row that neither has is not NULL. If a later run of the batch has a change of its key, that change decides: until then the row
is not there. Else the table is refused, and copied again.
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
from headwater.destinations.iceberg.net import NetChanges, Pending
from headwater.destinations.iceberg.refuse import value_is_gone
from headwater.destinations.iceberg.sessions import LakeSession
from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.types import lake_arrow_schema, quote, spark_schema, to_lake
from headwater.events import ChangeRun
from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema
from headwater.spark.frames import FrameSpool

Indexes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Target:
    """A lake table at the snapshot that was looked at."""

    table: LakeTable
    start: int


@dataclass(frozen=True, slots=True)
class MissingValues:
    """Completes net changes before they are merged. `counted` is told how many rows were read from the source."""

    spool: FrameSpool
    read_source_rows: Callable[[ReplicatedTableSchema, pa.Table], pa.Table]
    counted: Callable[[int], None]

    def complete(
        self,
        session: LakeSession,
        target: Target | None,
        schema: ReplicatedTableSchema,
        net: NetChanges,
        later: Sequence[ChangeRun] = (),
    ) -> NetChanges:
        """The same changes with nothing pending. No target: it counts as empty (after a truncate)."""
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
        rest = np.flatnonzero(~found)
        if len(rest):
            keys = upserts.select(schema.key).take(pa.array(pending.rows[rest]))
            there = self._read_source(schema, keys)
            self.counted(len(rest))
            where = _positions(keys, there, schema.key)
            upserts = _put(upserts, pending, rest[where >= 0], there, where[where >= 0])
            found[rest[where >= 0]] = True
        complete = replace(net, upserts=upserts, pending=None)
        return complete if found.all() else _left_to_later(complete, schema, pending.rows[~found], later)

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

    def _read_source(self, schema: ReplicatedTableSchema, keys: pa.Table) -> pa.Table:
        source = source_schema(schema)
        types = arrow_schema(source)
        wanted = keys.select(schema.key).rename_columns(source.key)
        rows = self.read_source_rows(source, wanted.cast(pa.schema([types.field(name) for name in source.key])))
        lake = lake_arrow_schema(schema)
        return to_lake(rows.rename_columns(lake.names), lake)


def _left_to_later(
    net: NetChanges, schema: ReplicatedTableSchema, rows: Indexes, later: Sequence[ChangeRun]
) -> NetChanges:
    """These upserts as deletes, if a later run has the last word on each of their keys."""
    keys = net.upserts.select(schema.key).take(pa.array(rows))
    spoken = np.zeros(len(rows), np.bool_)
    for run in later:
        for changed in (run.new, run.old):
            if changed is not None and all(name in changed.column_names for name in schema.key):
                spoken |= _positions(keys, to_lake(changed.select(schema.key), keys.schema), schema.key) >= 0
    if not spoken.all():
        raise value_is_gone(schema.name, int(np.count_nonzero(~spoken)))
    keep = np.ones(net.upserts.num_rows, np.bool_)
    keep[rows] = False
    return replace(
        net,
        deletes=pa.concat_tables([net.deletes, keys.select(net.deletes.column_names)]),
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
