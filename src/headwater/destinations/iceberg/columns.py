"""The columns of an Iceberg schema, fetched from Spark's JVM in one call, however many there are.

With calls for each column, a batch in 60 columns made 24,272 of them, and one in 5 columns 990. Types are compared as text,
without the ids of nested fields, which differ between two schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headwater.destinations.iceberg.types import spark_schema


@dataclass(frozen=True, slots=True)
class LakeColumns:
    """The top-level columns of a schema, by name, in its order. `types` are Iceberg's own texts."""

    ids: dict[str, int]
    types: dict[str, str]
    schema: Any
    """Iceberg's own, in the JVM."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __contains__(self, name: str) -> bool:
        return name in self.ids

    def java_type(self, name: str) -> Any:
        """By id: to Iceberg, a name with a dot in it is a path."""
        return self.schema.findField(self.ids[name]).type()


def columns_of(iceberg: Any, schema: Any) -> LakeColumns:
    """`iceberg` is the JVM's package org.apache.iceberg, `schema` a Schema of it."""
    fields = json.loads(iceberg.SchemaParser.toJson(schema))["fields"]
    ids, types = {f["name"]: f["id"] for f in fields}, {f["name"]: type_text(f["type"]) for f in fields}
    return LakeColumns(ids, types, schema)


def wanted_columns(jvm: Any, schema: pa.Schema) -> LakeColumns:
    """The columns that Iceberg would make of Arrow's; their ids mean nothing to a table."""
    iceberg = jvm.org.apache.iceberg
    struct = jvm.org.apache.spark.sql.types.DataType.fromJson(spark_schema(schema).json())
    return columns_of(iceberg, iceberg.spark.SparkSchemaUtil.convert(struct))


def type_text(type: Any) -> str:
    """A type of a schema's JSON as Iceberg's toString() has it. We make no maps and structs: of those, that they are."""
    if isinstance(type, str):
        return type
    if type["type"] == "list":
        return f"list<{type_text(type['element'])}>"
    return str(type["type"])
