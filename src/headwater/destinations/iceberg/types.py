"""What a column is in the lake: Arrow types that Iceberg has, their Spark counterparts, and names as SQL takes them.

Iceberg has no 16-bit integer, so int16 is widened; all columns are optional, since a Postgres NOT NULL may come and go.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import types as spark

from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema, TableName
from headwater.spark.types import spark_type


def lake_arrow_schema(schema: ReplicatedTableSchema) -> pa.Schema:
    """The replicated columns as the lake stores them."""
    return pa.schema([pa.field(field.name, _lake_type(field.type)) for field in arrow_schema(schema)])


def to_lake(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The same rows in the types of the lake's columns; types are only widened here."""
    return table if table.schema.equals(schema) else table.cast(schema)


def spark_schema(schema: pa.Schema) -> spark.StructType:
    return spark.StructType([spark.StructField(field.name, spark_type(field.type), True) for field in schema])


def quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def quote_string(text: str) -> str:
    """A SQL string literal of Spark, which reads backslashes as escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def lake_identifier(catalog: str, name: TableName) -> str:
    """The table's name in SQL: `catalog`.`namespace`.`name`."""
    return ".".join(quote(part) for part in (catalog, name.namespace, name.name))


def _lake_type(type: pa.DataType) -> pa.DataType:
    if pa.types.is_list(type):
        return pa.list_(pa.field("element", _lake_type(type.value_type)))
    return pa.int32() if type == pa.int16() else type
