"""Column names that Iceberg and Spark reserve, and what such columns are called in the lake. Pure.

A column `_pos` of the source would hide Iceberg's metadata column `_pos`, and MERGE and reads of the table fail. It becomes
`_pos_`. The name follows from the columns of the source alone, so copy, stream and a later run agree; the table's property
`headwater.column-names` and the column's comment have the original name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headwater.events import ChangeRun, Step
from headwater.schema.table import ReplicatedTableSchema, TableSchema

COLUMN_NAMES = "headwater.column-names"

RESERVED = frozenset(
    {
        # org.apache.iceberg.MetadataColumns
        "_file",
        "_pos",
        "_deleted",
        "_spec_id",
        "_partition",
        "_change_type",
        "_change_ordinal",
        "_commit_snapshot_id",
        "_row_id",
        "_last_updated_sequence_number",
        # What Spark adds to the rows of a MERGE.
        "__row_operation",
        "__row_id",
        "__row_from_source",
        "__row_from_target",
    }
)


@dataclass(frozen=True)
class LakeSchema(ReplicatedTableSchema):
    """A schema with the column names of the lake; `source` has those of the source."""

    source: ReplicatedTableSchema | None = None


def lake_names(schema: TableSchema) -> Mapping[str, str]:
    """Source name to lake name, of the columns whose names differ. Readers may ignore case, so the comparison does too."""
    taken = {column.name.lower() for column in schema.columns}
    names = {}
    for column in schema.columns:
        if column.name.lower() in RESERVED:
            name = f"{column.name}_"
            while name.lower() in taken or name.lower() in RESERVED:
                name += "_"
            taken.add(name.lower())
            names[column.name] = name
    return names


def in_lake_names(schema: ReplicatedTableSchema) -> ReplicatedTableSchema:
    """The schema with the column names of the lake; the same object if they are those of the source."""
    names = lake_names(schema.table_schema)
    if not names:
        return schema
    return LakeSchema(renamed_schema(schema.table_schema), schema.replication_mask, schema)


def renamed_schema(schema: TableSchema) -> TableSchema:
    names = lake_names(schema)
    if not names:
        return schema
    return replace(
        schema,
        columns=tuple(replace(column, name=names.get(column.name, column.name)) for column in schema.columns),
        identity_columns=tuple(names.get(name, name) for name in schema.identity_columns),
    )


def source_schema(schema: ReplicatedTableSchema) -> ReplicatedTableSchema:
    """The schema with the column names of the source."""
    return schema.source if isinstance(schema, LakeSchema) and schema.source is not None else schema


def step_in_lake_names(step: Step) -> Step:
    schema = in_lake_names(step.schema)
    if schema is step.schema:
        return step
    if not isinstance(step, ChangeRun):
        return replace(step, schema=schema)
    names = [column.name for column in schema.columns]
    lake = dict(zip((column.name for column in step.schema.columns), names, strict=True))
    return replace(
        step,
        schema=schema,
        new=step.new.rename_columns([lake[name] for name in step.new.column_names]),
        old=None if step.old is None else step.old.rename_columns([lake[name] for name in step.old.column_names]),
        unchanged={lake[name]: flags for name, flags in step.unchanged.items()},
    )


def names_property(schema: TableSchema) -> dict[str, str]:
    """For the table's properties: which columns have another name in the lake."""
    names = lake_names(schema)
    return {COLUMN_NAMES: json.dumps(dict(names), sort_keys=True, ensure_ascii=False)} if names else {}
