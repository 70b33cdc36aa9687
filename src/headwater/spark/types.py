"""Arrow types as Spark sees them. One function, so that copy, changes and lake tables declare the same."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import types as spark

from headwater.schema.arrow import arrow_type
from headwater.schema.table import ColumnSchema, ReplicatedTableSchema

_SIMPLE: dict[pa.DataType, spark.DataType] = {
    pa.bool_(): spark.BooleanType(),
    pa.int16(): spark.ShortType(),
    pa.int32(): spark.IntegerType(),
    pa.int64(): spark.LongType(),
    pa.float32(): spark.FloatType(),
    pa.float64(): spark.DoubleType(),
    pa.string(): spark.StringType(),
    pa.binary(): spark.BinaryType(),
    pa.date32(): spark.DateType(),
    pa.timestamp("us"): spark.TimestampNTZType(),
    pa.timestamp("us", tz="UTC"): spark.TimestampType(),
}


def spark_type(type: pa.DataType) -> spark.DataType:
    if pa.types.is_list(type):
        return spark.ArrayType(spark_type(type.value_type), containsNull=True)
    if pa.types.is_decimal128(type):
        return spark.DecimalType(type.precision, type.scale)
    return _SIMPLE[type]


def spark_columns(columns: Sequence[ColumnSchema]) -> spark.StructType:
    """All nullable: an older version of a row in the lake may lack what the source demands today."""
    return spark.StructType([spark.StructField(c.name, spark_type(arrow_type(c)), nullable=True) for c in columns])


def spark_schema(schema: ReplicatedTableSchema) -> spark.StructType:
    return spark_columns(schema.columns)
