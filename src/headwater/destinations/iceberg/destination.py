"""Iceberg tables as mirrors of the source's, written through Spark SQL.

Puts the parts together: which lake table a source table has, which thread writes it with which session, what is recorded when.
Progress is recorded only after every table of a batch is durable (invariant 2).
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pyspark.sql import SparkSession

from headwater.config import DestinationConfig
from headwater.contracts.destination import Destination, RunContext
from headwater.contracts.metadata import DestinationTableMetadata
from headwater.contracts.results import DropTableForCopyResult, WriteEventsResult, WriteTableRowsResult
from headwater.contracts.stores import DestinationStore
from headwater.destinations.iceberg.apply import Applied, KnownWatermarks, TableApply
from headwater.destinations.iceberg.copy import TableCopies
from headwater.destinations.iceberg.look import LakeLook, look_at
from headwater.destinations.iceberg.owner import Owner, Writers
from headwater.destinations.iceberg.said import translated
from headwater.destinations.iceberg.sessions import SessionPool
from headwater.destinations.iceberg.shared_storage import check_shared, is_one_process
from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.types import lake_identifier
from headwater.destinations.iceberg.unchanged_values import MissingValues, ReadOn
from headwater.destinations.iceberg.warehouse import location, prepare_warehouse, spark_catalog, warehouse_path
from headwater.destinations.iceberg.write_failures import WriteFailures
from headwater.destinations.iceberg.writer import MergeWriter
from headwater.errors import HeadwaterError
from headwater.events import EventBatch, TableRows
from headwater.lsn import EndLsn
from headwater.private_files import temporary_directory
from headwater.schema.table import ReplicatedTableSchema, TableId, TableName
from headwater.spark.errors import is_jvm_lost
from headwater.spark.frames import FrameSpool
from headwater.spark.sql_text import NameSubstituted
from headwater.wire.spool import Spool

_log = logging.getLogger(__name__)


class IcebergDestination(Destination):
    """`spark` must know the catalog: build its session with `warehouse.spark_catalog`."""

    def __init__(self, spark: SparkSession, store: DestinationStore, settings: DestinationConfig) -> None:
        self._spark = spark
        self._store = store
        self._settings = settings
        self._sessions = SessionPool(spark, settings.catalog.name, spark_catalog(settings))
        # A copy holds its session for as long as it takes: with one pool, eight of them would leave none for changes.
        self._copy_sessions = SessionPool(spark, settings.catalog.name, spark_catalog(settings))
        self._batches = ThreadPoolExecutor(thread_name_prefix="headwater-lake-batch")
        self._tables = ThreadPoolExecutor(settings.max_parallel_tables, thread_name_prefix="headwater-lake-table")
        self._count_lock = threading.Lock()
        self._writers = Writers()
        self._write_failures = WriteFailures(self._lake_works)
        self._looks: dict[TableId, LakeLook] = {}
        self._source_rows_read = 0
        self._context: RunContext | None = None
        self._apply: TableApply | None = None
        self._copies: TableCopies | None = None

    @classmethod
    def name(cls) -> str:
        return "iceberg"

    @property
    def source_rows_read(self) -> int:
        """How many rows had to be read from the source again, because neither batch nor lake had an unchanged value of theirs."""
        with self._count_lock:
            return self._source_rows_read

    def start(self, context: RunContext) -> None:
        prepare_warehouse(self._settings)
        if not is_one_process(str(self._spark.sparkContext.master)):
            self._check_shared()
        spool = FrameSpool(self._spool_location(context))
        spool.sweep()
        self._context = context
        writer = MergeWriter(spool)
        self._copies = TableCopies(self._store, context, self._settings, writer)
        missing = MissingValues(spool, context.read_source_rows, self._count_source_rows)
        self._apply = TableApply(self._store, context, writer, spool, missing, KnownWatermarks(), Spool(spool.disk()))

    def _check_shared(self) -> None:
        try:
            check_shared(self._spark, self._settings.catalog.name, location(self._settings))
        except Exception as error:
            raise translated(error) from error

    def shutdown(self) -> None:
        self._batches.shutdown(wait=True)
        self._tables.shutdown(wait=True)

    def furthest_position(self, table_ids: Sequence[TableId]) -> EndLsn | None:
        """Read from the lake itself: it is ahead of the store after a crash, or after a restore of the store."""
        # The position of another copy says nothing here; `missing_tables` reports such a table.
        marks = (look.mark for look in self._look_at(table_ids).values() if look.is_recorded_copy)
        return max((mark.position for mark in marks if mark is not None), default=None)

    def missing_tables(self, table_ids: Sequence[TableId]) -> Mapping[TableId, HeadwaterError]:
        """Tables that do not exist any more, belong to another owner, have no watermark, are of another copy, or are behind what
        the store recorded."""
        errors = {table: look.error for table, look in self._look_at(table_ids).items()}
        return {table: error for table, error in errors.items() if error is not None}

    def _look_at(self, table_ids: Sequence[TableId]) -> dict[TableId, LakeLook]:
        """What the lake has of these tables. Both methods are called, in turn, before any write: one load serves both."""
        with self._count_lock:
            known, self._looks = self._looks, {}
        if known and known.keys() >= set(table_ids):
            return {table: known[table] for table in table_ids}
        try:
            found = dict(zip(table_ids, self._tables.map(self._look_at_table, table_ids), strict=True))
        except Exception as error:
            raise translated(error) from error
        with self._count_lock:
            self._looks = found
        return found

    def _look_at_table(self, table_id: TableId) -> LakeLook:
        assert self._context is not None, "start() comes first"
        metadata = self._store.get_destination_table_metadata(table_id)
        if metadata is None:
            return LakeLook()
        identifier = metadata.destination_table_id
        try:
            with self._sessions.session(f"look at {identifier}", [identifier]) as session:
                table = LakeTable.load(session.spark, identifier)
                return look_at(table, metadata, Owner.of(self._context, table_id), self._context.timeline())
        except NameSubstituted as error:
            return LakeLook(error=error)

    def drop_table_for_copy(
        self, replicated_table_schema: ReplicatedTableSchema, result: DropTableForCopyResult
    ) -> None:
        # The old rows stay until the commit of the new copy replaces them, and the copy brings an epoch of its own.
        result.done()

    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        assert self._copies is not None, "start() comes first"
        try:
            identifier = lake_identifier(self._settings.catalog.name, replicated_table_schema.name)
            with (
                self._writers.writing(identifier, replicated_table_schema.id, replicated_table_schema.name),
                self._copy_sessions.session(
                    f"copy {replicated_table_schema.name}", _names(replicated_table_schema)
                ) as session,
            ):
                metadata = self._copies.write(session, replicated_table_schema, table_rows)
            self._store.store_destination_table_metadata(replicated_table_schema.id, metadata)
        except Exception as error:
            result.failed(translated(error))
            return
        result.done()

    def write_events(self, events: EventBatch, result: WriteEventsResult) -> None:
        self._batches.submit(self._write_batch, events, result)

    def _write_batch(self, events: EventBatch, result: WriteEventsResult) -> None:
        """Every table by itself: a table that cannot continue is returned with its error, the others of the batch are durable."""
        try:
            names = {table: steps[-1].schema.name for table, steps in events.tables.items() if steps}
            applied, failed = self._write_tables(events, names)
            written = {table: part.metadata for table, part in applied.items()}
            result.missed(_told_missed(names, applied))
            waiting = {table: error for table, error in failed.items() if isinstance(error, ReadOn)}
            result.reads_on({table: error.read for table, error in waiting.items()})
            failed |= {table: error.without_rows() for table, error in waiting.items()}
            self._write_failures.written(applied)
            failed = self._write_failures.judged(failed, {table: str(names[table]) for table in failed})
            current = {table: metadata for table, metadata in written.items() if self._is_current(table, metadata)}
            if current:
                self._store.store_destination_tables_metadata(current)
        except BaseException as error:
            result.failed(translated(error))
            return
        if failed:
            result.failed_tables(failed)
        else:
            result.done()

    def _write_tables(
        self, events: EventBatch, names: Mapping[TableId, TableName]
    ) -> tuple[dict[TableId, Applied], dict[TableId, HeadwaterError]]:
        written: dict[TableId, Applied] = {}
        failed: dict[TableId, HeadwaterError] = {}
        futures = {table: self._tables.submit(self._write_table, table, name, events) for table, name in names.items()}
        # All of them to the end: a batch is tried again only when nothing of it is under way any more.
        for table, future in futures.items():
            try:
                written[table] = future.result()
            except Exception as error:
                failed[table] = translated(error)
        return written, failed

    def _lake_works(self, failing: TableId) -> bool:
        """Whether a table can be loaded and a file written beside its data: another table's, if there is one."""
        others = sorted(table for table in self._store.get_table_states() if table != failing)
        for table_id in [*others[:1], failing]:
            metadata = self._store.get_destination_table_metadata(table_id)
            if metadata is None:
                continue
            try:
                identifier = metadata.destination_table_id
                purpose = f"look whether {identifier} can be written"
                with self._sessions.session(purpose, [identifier]) as session:
                    table = LakeTable.load(session.spark, identifier)
                    if table is not None:
                        table.write_probe()
                        return True
            except Exception as error:
                if is_jvm_lost(error):
                    return False
                _log.info("the lake cannot be written either: %s", type(error).__name__)
        return False

    def _is_current(self, table_id: TableId, metadata: DestinationTableMetadata) -> bool:
        """Whether the recorded copy is still the one these changes belong to: the record of a newer one must not be replaced."""
        recorded = self._store.get_destination_table_metadata(table_id)
        if recorded is None or recorded.watermark is None or metadata.watermark is None:
            return recorded is not None
        return recorded.watermark.epoch == metadata.watermark.epoch

    def _write_table(self, table_id: TableId, name: TableName, events: EventBatch) -> Applied:
        assert self._apply is not None, "start() comes first"
        metadata = self._store.get_destination_table_metadata(table_id)
        identifier = "" if metadata is None else metadata.destination_table_id
        names = {identifier, *(name for step in events.tables[table_id] for name in _names(step.schema))}
        with (
            self._writers.writing(identifier or f"table {table_id}", table_id, name),
            self._sessions.session(f"apply changes to {name}", names) as session,
        ):
            return self._apply.apply(session, table_id, events)

    def _count_source_rows(self, count: int) -> None:
        with self._count_lock:
            self._source_rows_read += count

    def _spool_location(self, context: RunContext) -> str:
        """A directory of this pipeline that driver and executors both see.

        Its name contains the source too: another source with the same pipeline id may have tables in the same warehouse.
        """
        source = f"{context.system_identifier} {context.database_oid}"
        name = f"spool-{context.pipeline_id}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"
        warehouse = warehouse_path(self._settings)
        if warehouse is not None:
            return str(warehouse / ".headwater" / name)
        if not str(self._spark.sparkContext.master).startswith("local"):
            return f"{location(self._settings)}/.headwater/{name}"
        which = hashlib.sha256(f"{location(self._settings)} {name}".encode()).hexdigest()[:16]
        return str(temporary_directory(f"spool-{which}"))


def _names(schema: ReplicatedTableSchema) -> list[str]:
    """Every name of the source that statements about this table contain."""
    return [schema.name.namespace, schema.name.name, *(column.name for column in schema.columns)]


def _told_missed(names: Mapping[TableId, TableName], applied: dict[TableId, Applied]) -> dict[TableId, int]:
    """Once for each batch and table. For an exact mirror there are none."""
    missed = {table: part.missed for table, part in applied.items() if part.missed}
    for table, count in missed.items():
        _log.warning(
            "table %s: %d updates or deletes found no row in the lake; compare its replica identity with its partitions'",
            names[table],
            count,
        )
    return missed
