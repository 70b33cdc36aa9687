"""A lake table as Arrow, read by pyiceberg: not the engine that wrote it. Needs the extra `iceberg-read`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog

from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema, TableName

CATALOG_FILE = "catalog.db"


def open_lake(warehouse: Path, catalog: str = "lake") -> SqlCatalog:
    """The embedded catalog of a warehouse."""
    return SqlCatalog(catalog, uri=f"sqlite:///{warehouse / CATALOG_FILE}", warehouse=warehouse.as_uri())


def read_lake(catalog: Catalog, schema: ReplicatedTableSchema) -> Iterator[pa.RecordBatch]:
    """All rows of the table's present lake snapshot, as the types the source side has.

    A type of the lake that is wider (Iceberg has no 16-bit integers) is narrowed, and an overflow there is an error; a
    column that is missing or one too many is an error too.
    """
    wanted = arrow_schema(schema)
    table = catalog.load_table((schema.name.namespace, schema.name.name))
    found = [field.name for field in table.schema().fields]
    if sorted(found) != sorted(wanted.names):
        raise LookupError(f"lake table {schema.name} has the columns {found}, the source has {wanted.names}")
    for batch in table.scan().to_arrow_batch_reader():
        ordered = pa.table(batch.columns, names=batch.schema.names).select(wanted.names)
        yield from ordered.cast(wanted).to_batches()


def lake_watermark(catalog: Catalog, name: TableName) -> Mapping[str, str]:
    """The `headwater.*` properties of the table's present lake snapshot."""
    snapshot = catalog.load_table((name.namespace, name.name)).current_snapshot()
    if snapshot is None or snapshot.summary is None:
        return {}
    properties = snapshot.summary.additional_properties
    return {key: value for key, value in properties.items() if key.startswith("headwater.")}
