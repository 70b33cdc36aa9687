"""Brings one lake table up to the end of a batch: read the watermark, write what it does not cover, read it again.

Reading it again shows the outcome of the attempt (invariant 6): whatever error a commit raised, the watermark in the table
decides what is left to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from headwater.contracts.destination import RunContext
from headwater.contracts.metadata import DestinationTableMetadata, SchemaStatus, Watermark
from headwater.contracts.stores import DestinationStore
from headwater.destinations.iceberg.look import table_is_gone
from headwater.destinations.iceberg.names import renamed_schema, step_in_lake_names
from headwater.destinations.iceberg.net import NetChanges
from headwater.destinations.iceberg.outcome import CommitOutcome, outcome_of
from headwater.destinations.iceberg.owner import Owner, check_for_changes
from headwater.destinations.iceberg.parts import delta_in_parts, net_in_parts
from headwater.destinations.iceberg.refuse import checked, refused
from headwater.destinations.iceberg.said import translated
from headwater.destinations.iceberg.schema import evolve, renamed_columns, replaced_columns
from headwater.destinations.iceberg.sessions import LakeSession
from headwater.destinations.iceberg.table import LakeTable, Published
from headwater.destinations.iceberg.types import lake_arrow_schema, spark_schema, to_lake
from headwater.destinations.iceberg.unchanged_values import MissingValues, Target
from headwater.destinations.iceberg.watermark import (
    check_lineage,
    find_watermark,
    mark_of,
    snapshot_properties,
    steps_after,
)
from headwater.destinations.iceberg.writer import LakeCommit, TableWriter
from headwater.errors import DestinationError, DestinationUnavailable, HeadwaterError, LakeCommitUnknown
from headwater.events import ChangeRun, EventBatch, Step, TruncateStep
from headwater.schema.table import TableId
from headwater.spark.errors import is_jvm_lost
from headwater.spark.frames import FrameSpool
from headwater.wire.spool import Spool

_ATTEMPTS = 3
_log = logging.getLogger(__name__)


class KnownWatermarks:
    """The watermark each table had at a lake snapshot, so that the usual look costs no walk through the history."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[TableId, tuple[int, Watermark]] = {}

    def of(self, table_id: TableId, table: LakeTable) -> Watermark | None:
        snapshot_id = table.snapshot_id
        if snapshot_id is None:
            return None
        with self._lock:
            known = self._known.get(table_id)
        if known is not None and known[0] == snapshot_id:
            return known[1]
        mark = find_watermark(table.history())
        with self._lock:
            if mark is None:
                self._known.pop(table_id, None)
            else:
                self._known[table_id] = (snapshot_id, mark)
        return mark


@dataclass(frozen=True, slots=True)
class Applied:
    """The outcome for one table's part of a batch."""

    metadata: DestinationTableMetadata
    """To be recorded."""
    missed: int = 0
    """How many updates and deletes found no row; a lower bound if inserts replaced rows in the same commit."""


@dataclass(frozen=True, slots=True)
class _Commit:
    """What every commit of one call has in common."""

    session: LakeSession
    table: LakeTable
    metadata: DestinationTableMetadata
    mark: Watermark
    events: EventBatch


@dataclass(frozen=True, slots=True)
class TableApply:
    """Applies steps to tables; keeps nothing of a single table but the watermarks seen."""

    store: DestinationStore
    context: RunContext
    writer: TableWriter
    spool: FrameSpool
    missing: MissingValues
    known: KnownWatermarks
    disk: Spool

    def apply(self, session: LakeSession, table_id: TableId, events: EventBatch) -> Applied:
        """Write what the lake lacks of a table's part of the batch."""
        steps = events.tables[table_id]
        metadata = self.store.get_destination_table_metadata(table_id)
        name = str(steps[-1].schema.name)
        if metadata is None:
            check_lineage(name, None, None)
        assert metadata is not None
        last_error: Exception | None = None
        table: LakeTable | None = None
        missed = 0
        for attempt in range(_ATTEMPTS + 1):
            table = self._look(session, metadata.destination_table_id, name, table, last_error)
            check_for_changes(table, Owner.of(self.context, table_id), name)
            found = self.known.of(table_id, table)
            mark = check_lineage(name, found, metadata.watermark, self.context.timeline())
            rest = steps_after(steps, mark)
            if not rest:
                return Applied(_recorded(metadata, steps[-1], mark), missed)
            if attempt == _ATTEMPTS:
                break
            start = table.snapshot_id
            assert start is not None, "a table with a watermark has a snapshot"
            try:
                commit = _Commit(session, table, metadata, self._ours(table_id, mark), events)
                missed += self._write(commit, start, rest)
                last_error = None
            except HeadwaterError:
                raise
            except Exception as error:
                if is_jvm_lost(error):
                    raise translated(error) from error
                last_error = error
                outcome = outcome_of(error)
                if outcome is CommitOutcome.UNKNOWN:
                    session.end_attempt()
                said = translated(error)
                # An unreachable lake is logged by the caller that waits for it, once for each attempt.
                level = logging.INFO if isinstance(said, DestinationUnavailable) else logging.WARNING
                _log.log(level, "lake commit to %s %s, reading its watermark: %s", name, outcome, said.detail)
        unreachable = translated(last_error) if last_error is not None else None
        if isinstance(unreachable, DestinationUnavailable):
            raise unreachable from last_error
        raise DestinationError(
            f"changes could not be committed to lake table {name}",
            detail=translated(last_error).detail if last_error is not None else "the commits left no watermark",
            hint="The batch is retried. If another program writes to this table, stop it: a mirror must have one writer.",
        ) from last_error

    def _look(
        self, session: LakeSession, identifier: str, name: str, table: LakeTable | None, after: Exception | None
    ) -> LakeTable:
        try:
            if table is not None:
                table.refresh()
                return table
            loaded = LakeTable.load(session.spark, identifier)
        except Exception as error:
            if is_jvm_lost(error) or after is None:
                raise translated(error) from error
            raise LakeCommitUnknown(
                f"the outcome of a commit to lake table {name} is unknown",
                detail=f"{translated(after).detail}; then, when its watermark was read: {translated(error).detail}",
                hint="Check that catalog and storage of the lake are reachable. The batch is retried; nothing is applied twice.",
            ) from error
        if loaded is None:
            raise table_is_gone(name, identifier)
        return loaded

    def _ours(self, table_id: TableId, mark: Watermark) -> Watermark:
        """The lineage of what this run commits on top of the mark."""
        context = self.context
        return replace(
            mark,
            database_oid=context.database_oid or mark.database_oid,
            table_id=table_id,
            timeline=context.timeline() or mark.timeline,
            run=context.run_token,
        )

    def _write(self, commit: _Commit, start: int, steps: list[Step]) -> int:
        """One lake commit per run, a truncate together with the run after it. Returns how many changes found no row."""
        steps = [step_in_lake_names(step) for step in steps]
        runs = [checked(step) for step in steps if isinstance(step, ChangeRun)]
        missed = 0
        if isinstance(steps[0], TruncateStep):
            start, missed = self._replace(commit, start, steps[0], runs)
            runs = runs[1:]
        for number, run in enumerate(runs):
            start, more = self._merge(commit, start, run, runs[number + 1 :])
            missed += more
        return missed

    def _replace(self, commit: _Commit, start: int, truncate: Step, runs: Sequence[ChangeRun]) -> tuple[int, int]:
        last: Step = runs[0] if runs else truncate
        self._in_step(commit, last, rows_are_replaced=True)
        wanted = lake_arrow_schema(last.schema)
        rows, missed = wanted.empty_table(), 0
        if isinstance(last, ChangeRun):
            rows, missed = self._rows_after_truncate(commit, _in_lake_types(last, wanted), runs[1:])
        properties = snapshot_properties(mark_of(last, commit.mark))
        with self.spool.frame(commit.session.spark, rows, spark_schema(wanted)) as frame:
            done = self.writer.replace(LakeCommit(commit.session, commit.table, start, properties), frame)
        return done.snapshot_id, missed

    def _rows_after_truncate(self, commit: _Commit, run: ChangeRun, later: Sequence[ChangeRun]) -> tuple[pa.Table, int]:
        if run.schema.key:
            net = self._net(commit, None, run, later)
            return net.upserts, net.expected
        delta = delta_in_parts(run, self.disk)
        return delta.added, int(delta.removed_count.sum())

    def _net(self, commit: _Commit, target: Target | None, run: ChangeRun, later: Sequence[ChangeRun]) -> NetChanges:
        def net(part: ChangeRun) -> NetChanges:
            return self.missing.complete(commit.session, target, part, commit.events, later)

        return net_in_parts(run, run.schema.key, self.disk, net)

    def _merge(self, commit: _Commit, start: int, run: ChangeRun, later: Sequence[ChangeRun]) -> tuple[int, int]:
        self._in_step(commit, run, rows_are_replaced=False)
        session, table, key = commit.session, commit.table, run.schema.key
        onto = LakeCommit(session, table, start, snapshot_properties(mark_of(run, commit.mark)))
        run = _in_lake_types(run, lake_arrow_schema(run.schema))
        if key:
            target = Target(table, start)
            net = self._net(commit, target, run, later)
            if run.schema.table_schema.strict_inserts:
                self._refuse_met_inserts(session, target, run, net)
            done = self.writer.merge(onto, key, net)
            return done.snapshot_id, _missed(net.expected, net.upserts.num_rows, done)
        if run.schema.insert_only:
            return self.writer.append(onto, run.new).snapshot_id, 0
        delta = delta_in_parts(run, self.disk)
        done = self.writer.apply_delta(onto, delta)
        return done.snapshot_id, _missed(int(delta.removed_count.sum()), delta.added.num_rows, done)

    def _refuse_met_inserts(self, session: LakeSession, target: Target, run: ChangeRun, net: NetChanges) -> None:
        """Where nothing but the rows themselves makes the key unique, an INSERT of a key that exists is another row."""
        if net.arrivals is None or not net.arrivals.any():
            return
        arrived = net.upserts.filter(pa.array(net.arrivals))
        count = self.missing.count_in_target(session, target, run.schema, arrived)
        if count:
            raise refused(run.schema.name, f"{count} inserted rows have a key that other rows have already")

    def _in_step(self, commit: _Commit, step: Step, *, rows_are_replaced: bool) -> None:
        schema, spark = step.schema, commit.session.spark
        before = self.store.get_table_schema(schema.id, commit.metadata.snapshot_id)
        renamed = renamed_columns(None if before is None else renamed_schema(before), schema.table_schema)
        wanted = lake_arrow_schema(schema)
        if schema.table_schema.snapshot_id == commit.metadata.snapshot_id and not rows_are_replaced:
            # The copy made it with all its columns: put back, one that another program dropped would be NULL in every old row.
            found = commit.table.columns()
            gone = [name for name in wanted.names if name not in found]
            if gone:
                raise refused(schema.name, f"the lake table has no column {', '.join(gone)} any more")
            others = replaced_columns(commit.table, found)
            if others:
                detail = "another program dropped and added, or renamed, columns of the lake table: "
                raise refused(schema.name, detail + ", ".join(others))
        evolve(spark, commit.table, wanted, renamed, rows_are_replaced=rows_are_replaced)


def _missed(expected: int, put: int, done: Published) -> int:
    """Rows that a commit was to replace or remove and that were not there. All `put` rows are in the table now, so what it
    did not grow by, it replaced or removed."""
    return 0 if done.gained_rows is None else max(0, expected - (put - done.gained_rows))


def _in_lake_types(run: ChangeRun, wanted: pa.Schema) -> ChangeRun:
    old = None if run.old is None else to_lake(run.old, wanted)
    return replace(run, new=to_lake(run.new, wanted), old=old)


def _recorded(metadata: DestinationTableMetadata, last: Step, mark: Watermark) -> DestinationTableMetadata:
    schema = last.schema
    if schema.table_schema.snapshot_id < metadata.snapshot_id:
        return replace(metadata, watermark=mark)
    return DestinationTableMetadata(
        metadata.destination_table_id,
        schema.table_schema.snapshot_id,
        schema.replication_mask,
        SchemaStatus.APPLIED,
        mark,
    )
