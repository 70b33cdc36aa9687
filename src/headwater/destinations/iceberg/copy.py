"""A table's copy in the lake: creates the lake table or takes it over, and writes all rows in one lake commit."""

from __future__ import annotations

import threading

from pyspark.sql import functions

from headwater.config import DestinationConfig
from headwater.contracts.destination import RunContext
from headwater.contracts.metadata import DestinationTableMetadata, SchemaStatus, Watermark
from headwater.contracts.stores import DestinationStore
from headwater.destinations.iceberg.names import in_lake_names, lake_names, names_property, source_schema
from headwater.destinations.iceberg.owner import Owner, check_for_copy
from headwater.destinations.iceberg.schema import (
    COLUMN_IDS,
    column_ids_property,
    create_table,
    evolve,
    table_properties,
)
from headwater.destinations.iceberg.sessions import LakeSession
from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.types import lake_arrow_schema, lake_identifier, quote
from headwater.destinations.iceberg.watermark import find_watermark, snapshot_properties
from headwater.destinations.iceberg.writer import LakeCommit, TableWriter
from headwater.errors import DestinationError
from headwater.events import TableRows
from headwater.lsn import CommitLsn
from headwater.schema.table import ReplicatedTableSchema
from headwater.secret import revealed
from headwater.spark.errors import is_jvm_lost
from headwater.spark.types import spark_type

COPY_ORDINAL = -1
"""A copy holds everything before its start position and no change at it."""


class TableCopies:
    """Writes copies of tables; keeps no state of a single one. Called from several threads, each with a session of its own."""

    def __init__(
        self, store: DestinationStore, context: RunContext, settings: DestinationConfig, writer: TableWriter
    ) -> None:
        self._store = store
        self._context = context
        self._settings = settings
        self._writer = writer
        self._create_lock = threading.Lock()

    def write(self, session: LakeSession, schema: ReplicatedTableSchema, rows: TableRows) -> DestinationTableMetadata:
        """One lake commit that replaces all rows of the table; readers see the old rows until then."""
        named = in_lake_names(schema)
        columns = lake_arrow_schema(named)
        table = self._table_for_copy(session, named, rows.take_over)
        mark = Watermark(
            self._context.pipeline_id,
            self._context.system_identifier,
            rows.epoch,
            CommitLsn(rows.start_lsn.value),
            COPY_ORDINAL,
            self._context.database_oid,
            schema.id,
            self._context.timeline() or 0,
            self._context.run_token,
        )
        frame = rows.dataframe.select(
            *(
                functions.col(quote(column.name)).cast(spark_type(field.type)).alias(field.name)
                for column, field in zip(schema.columns, columns, strict=True)
            )
        )
        try:
            properties = snapshot_properties(mark, opens_epoch=True)
            start = table.snapshot_id
            assert start is not None, "it was made with one"
            self._writer.replace(LakeCommit(session, table, start, properties), frame)
        except Exception as error:
            if is_jvm_lost(error):
                raise
            session.end_attempt()
            table.refresh()
            if find_watermark(table.history()) != mark:
                raise
        return DestinationTableMetadata(
            table.identifier, schema.table_schema.snapshot_id, schema.replication_mask, SchemaStatus.APPLIED, mark
        )

    def _table_for_copy(self, session: LakeSession, schema: ReplicatedTableSchema, take_over: bool) -> LakeTable:
        mine, source = Owner.of(self._context, schema.id), source_schema(schema).table_schema
        columns = lake_arrow_schema(schema)
        identifier = lake_identifier(self._settings.catalog.name, schema.name)
        table = LakeTable.load(session.spark, identifier)
        if table is None:
            # One at a time: IF NOT EXISTS is a look and an insert, and two tables may share their namespace.
            with self._create_lock:
                create_table(session.spark, self._settings, mine, schema.name, identifier, columns)
            table = LakeTable.load(session.spark, identifier)
            if table is None:
                raise DestinationError(
                    f"lake table {schema.name} does not exist right after it was created",
                    detail=f"the catalog does not list {identifier}",
                    hint="Check that no other program drops tables in this catalog; the copy is retried.",
                )
        check_for_copy(table, mine, self._store, name=schema.name, take_over=take_over)
        table.set_properties(
            table_properties(revealed(self._settings.table_properties))
            | mine.properties(schema.name)
            | names_property(source)
        )
        table.ensure_snapshot()
        evolve(session.spark, table, columns, {}, rows_are_replaced=True)
        table.set_properties({COLUMN_IDS: column_ids_property(table)})
        table.set_comments({lake: f'column "{name}" of the source' for name, lake in lake_names(source).items()})
        table.refresh()
        return table
