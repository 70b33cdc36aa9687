"""Catalog statements against a real lake: the run of tests/fuzz/catalog_run.py into Iceberg tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from pyiceberg.exceptions import NoSuchTableError
from pyspark.sql import SparkSession

from headwater.contracts.results import WriteTableRowsResult
from headwater.destinations.iceberg.destination import IcebergDestination
from headwater.events import TableRows
from headwater.schema.table import ReplicatedTableSchema
from headwater.store.postgres import PostgresStore
from headwater.testing.compare import TableComparison, compare_table
from headwater.testing.lake_rows import open_lake
from tests.conftest import Database
from tests.fuzz.catalog_run import CatalogRun, Published, Told, prepared
from tests.fuzz.looks import Looks
from tests.fuzz.model import Copy
from tests.integration.lake_pipeline import running_into_lake
from tests.integration.running_pipeline import RunningPipeline


class LakeRun(CatalogRun):
    """Written by Spark, read by pyiceberg."""

    def __init__(self, database: Database, looks: Looks, log: Told, spark: SparkSession, directory: Path) -> None:
        super().__init__(database, looks, log)
        self._spark, self._directory = spark, directory
        self._copies: list[Copy] = []

    @property
    def copies(self) -> Sequence[Copy]:
        return self._copies

    def compare(self, table: Published) -> TableComparison:
        lake, connection = open_lake(self._directory / "lake"), self.database.connection
        try:
            return compare_table(connection, table.name, lake, columns=table.columns, row_filter=table.row_filter)
        except NoSuchTableError as error:
            raise LookupError(f"the lake has no table {table.name}") from error

    def _open(self, store: PostgresStore) -> AbstractContextManager[RunningPipeline]:
        copies = self._copies

        class RecordsCopies(IcebergDestination):
            def write_table_rows(
                self,
                replicated_table_schema: ReplicatedTableSchema,
                table_rows: TableRows,
                result: WriteTableRowsResult,
            ) -> None:
                copies.append(Copy(replicated_table_schema.name, replicated_table_schema.id))
                super().write_table_rows(replicated_table_schema, table_rows, result)

        return running_into_lake(self.database, self._spark, self._directory, store, RecordsCopies)


def lake_run(
    database: Database, spark: SparkSession, directory: Path, statements: Sequence[str] = ()
) -> AbstractContextManager[LakeRun]:
    return prepared(lambda looks, log: LakeRun(database, looks, log, spark, directory), statements)
