"""Bringing one lake table up to the end of a batch: look at the watermark, write what is not covered, look again.

Looking again is how an attempt's outcome is learnt (invariant 6): whatever a commit said or failed to say, the watermark in
the table decides what is left to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from headwater.contracts.stores import DestinationStore, DestinationTableMetadata, SchemaStatus, Watermark
from headwater.destinations.iceberg.missing import MissingValues
from headwater.destinations.iceberg.net import NetChanges, net_changes
from headwater.destinations.iceberg.parts import delta_in_parts, net_in_parts
from headwater.destinations.iceberg.schema import evolve, renamed_columns
from headwater.destinations.iceberg.sessions import LakeSession, Outcome, outcome_of
from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.types import lake_arrow_schema, spark_schema, to_lake
from headwater.destinations.iceberg.watermark import (
    check_lineage,
    find_watermark,
    mark_of,
    snapshot_properties,
    steps_after,
)
from headwater.destinations.iceberg.writer import TableWriter
from headwater.errors import DestinationError, DestinationUnavailable, HeadwaterError, LakeCommitUnknown, WatermarkError
from headwater.events import ChangeRun, Step, TruncateStep
from headwater.schema.table import TableId
from headwater.spark.frames import FrameSpool
from headwater.spark.session import is_jvm_lost, translate
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
class TableApply:
    """Applies steps to tables; holds nothing of a single table but the watermarks seen."""

    store: DestinationStore
    writer: TableWriter
    spool: FrameSpool
    missing: MissingValues
    known: KnownWatermarks
    disk: Spool

    def apply(self, session: LakeSession, table_id: TableId, steps: Sequence[Step]) -> DestinationTableMetadata:
        """Write what the lake lacks of these steps, and return what is to be recorded."""
        metadata = self.store.get_destination_table_metadata(table_id)
        name = str(steps[-1].schema.name)
        if metadata is None:
            check_lineage(name, None, None)
        assert metadata is not None
        last_error: Exception | None = None
        table: LakeTable | None = None
        for _ in range(_ATTEMPTS):
            table = self._look(session, metadata.destination_table_id, name, table, last_error)
            mark = check_lineage(name, self.known.of(table_id, table), metadata.watermark)
            rest = steps_after(steps, mark)
            if not rest:
                return _recorded(metadata, steps[-1], mark)
            try:
                self._write(session, table, metadata, rest, mark)
                last_error = None
            except HeadwaterError:
                raise
            except Exception as error:
                if is_jvm_lost(error):
                    raise translate(error) from error
                last_error = error
                outcome = outcome_of(error)
                if outcome is Outcome.UNKNOWN:
                    session.end_attempt()
                found = translate(error)
                # An unreachable lake is told by whoever waits for it, once an attempt.
                level = logging.INFO if isinstance(found, DestinationUnavailable) else logging.WARNING
                _log.log(level, "lake commit to %s %s, looking at its watermark: %s", name, outcome, found.detail)
        if last_error is None:
            # The last of the attempts went well; only its watermark has not been looked at yet.
            table = self._look(session, metadata.destination_table_id, name, table, None)
            mark = check_lineage(name, self.known.of(table_id, table), metadata.watermark)
            if not steps_after(steps, mark):
                return _recorded(metadata, steps[-1], mark)
        unreachable = translate(last_error) if last_error is not None else None
        if isinstance(unreachable, DestinationUnavailable):
            raise unreachable from last_error
        raise DestinationError(
            f"changes could not be committed to lake table {name}",
            detail=translate(last_error).detail if last_error is not None else "the commits left no watermark",
            hint="The batch is tried again. If another program writes to this table, let it stop: the mirror has one writer.",
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
                raise translate(error) from error
            raise LakeCommitUnknown(
                f"it could not be learnt whether a commit to lake table {name} was done",
                detail=f"{translate(after).detail}; then, on looking: {translate(error).detail}",
                hint="Check that the lake's catalog and storage can be reached. The batch is tried again, nothing twice.",
            ) from error
        if loaded is None:
            raise WatermarkError(
                f"lake table {name} is gone",
                detail=f"the store recorded it as {identifier}",
                hint=f"Run `headwater resync` for {name} to copy the table again.",
            )
        return loaded

    def _write(
        self,
        session: LakeSession,
        table: LakeTable,
        metadata: DestinationTableMetadata,
        steps: list[Step],
        mark: Watermark,
    ) -> None:
        """One lake commit per run, a truncate together with the run after it."""
        truncate = isinstance(steps[0], TruncateStep)
        runs = [step for step in steps if isinstance(step, ChangeRun)]
        if truncate:
            self._replace(session, table, metadata, steps[0], runs[0] if runs else None, mark)
            table.refresh()
            runs = runs[1:]
        for run in runs:
            self._merge(session, table, metadata, run, mark)
            table.refresh()

    def _replace(
        self,
        session: LakeSession,
        table: LakeTable,
        metadata: DestinationTableMetadata,
        truncate: Step,
        run: ChangeRun | None,
        mark: Watermark,
    ) -> None:
        last: Step = run if run is not None else truncate
        self._in_step(session, table, metadata, last, rows_are_replaced=True)
        wanted = lake_arrow_schema(last.schema)
        rows = wanted.empty_table() if run is None else self._rows_after_truncate(session, _in_lake_types(run, wanted))
        properties = snapshot_properties(mark_of(last, mark))
        with self.spool.frame(session.spark, rows, spark_schema(wanted)) as frame:
            self.writer.replace(session, table, frame, properties)

    def _rows_after_truncate(self, session: LakeSession, run: ChangeRun) -> pa.Table:
        if run.schema.key:
            return self._net(session, None, run).upserts
        return delta_in_parts(run, self.disk).added

    def _net(self, session: LakeSession, table: LakeTable | None, run: ChangeRun) -> NetChanges:
        schema = run.schema

        def net(part: ChangeRun) -> NetChanges:
            return self.missing.complete(session, table, schema, net_changes(part, schema.key))

        return net_in_parts(run, schema.key, self.disk, net)

    def _merge(
        self,
        session: LakeSession,
        table: LakeTable,
        metadata: DestinationTableMetadata,
        run: ChangeRun,
        mark: Watermark,
    ) -> None:
        self._in_step(session, table, metadata, run, rows_are_replaced=False)
        key = run.schema.key
        properties = snapshot_properties(mark_of(run, mark))
        run = _in_lake_types(run, lake_arrow_schema(run.schema))
        if key:
            self.writer.merge(session, table, key, self._net(session, table, run), properties)
        elif run.schema.insert_only:
            self.writer.append(session, table, run.new, properties)
        else:
            self.writer.apply_delta(session, table, delta_in_parts(run, self.disk), properties)

    def _in_step(
        self,
        session: LakeSession,
        table: LakeTable,
        metadata: DestinationTableMetadata,
        step: Step,
        *,
        rows_are_replaced: bool,
    ) -> None:
        schema = step.schema
        before = self.store.get_table_schema(schema.id, metadata.snapshot_id)
        renamed = renamed_columns(before, schema.table_schema)
        evolve(session.spark, table, lake_arrow_schema(schema), renamed, rows_are_replaced=rows_are_replaced)


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
