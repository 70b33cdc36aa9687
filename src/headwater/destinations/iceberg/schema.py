"""Creates a table in the lake, and changes its columns to match the source's.

Columns are added, dropped, renamed and
widened in place by id; a change of type that Iceberg cannot follow in place is only allowed when a copy replaces all rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from headwater.config import DestinationConfig
from headwater.destinations.iceberg.columns import LakeColumns, wanted_columns
from headwater.destinations.iceberg.owner import Owner
from headwater.destinations.iceberg.table import LakeTable, iceberg_classes
from headwater.destinations.iceberg.types import quote, quote_string, spark_schema
from headwater.destinations.iceberg.warehouse import location
from headwater.errors import Retry, SchemaError
from headwater.schema.table import TableName, TableSchema
from headwater.secret import revealed

_log = logging.getLogger(__name__)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

TABLE_PROPERTIES: dict[str, str] = {
    "write.delete.mode": "merge-on-read",
    "write.update.mode": "merge-on-read",
    "write.merge.mode": "merge-on-read",
    "write.delete.isolation-level": "serializable",
    "write.update.isolation-level": "serializable",
    "write.merge.isolation-level": "serializable",
    # A copy arrives in files of a good size already; a shuffle before writing would double its cost.
    "write.distribution-mode": "none",
    # Two tasks must never write deletes for the same data file.
    "write.merge.distribution-mode": "hash",
    "write.parquet.compression-codec": "zstd",
    # Every batch makes a metadata file; without this they stay for ever.
    "write.metadata.delete-after-commit.enabled": "true",
    # They also show what an expired snapshot was: a run of maintenance makes 10 to 30 of them.
    "write.metadata.previous-versions-max": "50",
}


REQUIRED = (
    "write.merge.distribution-mode",
    *(name for name in TABLE_PROPERTIES if name.endswith(("e.mode", "isolation-level"))),
)
"""What the writer relies on: rows without a key are found by their place in a file, which copy-on-write does not give."""
COLUMN_IDS = "headwater.column-ids"


def table_properties(chosen: Mapping[str, str]) -> dict[str, str]:
    """Ours, with what a user chose; what the writer relies on stays."""
    kept = {name: TABLE_PROPERTIES[name] for name in REQUIRED}
    overruled = sorted(name for name, value in kept.items() if chosen.get(name, value) != value)
    if overruled:
        _log.warning(
            "table properties %s of the settings are ignored: the writer needs its own values", ", ".join(overruled)
        )
    return TABLE_PROPERTIES | dict(chosen) | kept


def column_ids_property(table: LakeTable) -> str:
    """A column that another program drops and adds again has its name and another id, and no values in old rows."""
    return json.dumps(table.columns().ids, sort_keys=True, ensure_ascii=False)


def replaced_columns(table: LakeTable, current: LakeColumns) -> list[str]:
    """Columns that are not those of the copy, by its record; none for a table of before there was one."""
    recorded = json.loads(table.property(COLUMN_IDS) or "{}")
    return [name for name, id in recorded.items() if current.ids.get(name, id) != id]


def create_table(
    session: SparkSession,
    settings: DestinationConfig,
    owner: Owner,
    name: TableName,
    identifier: str,
    columns: pa.Schema,
) -> None:
    """Make the namespace and the table, both only if missing."""
    session.sql(f"CREATE NAMESPACE IF NOT EXISTS {quote(settings.catalog.name)}.{quote(name.namespace)}")
    fields = ", ".join(f"{quote(f.name)} {f.dataType.simpleString()}" for f in spark_schema(columns).fields)
    properties = {"format-version": str(settings.format_version)} | table_properties(
        revealed(settings.table_properties)
    )
    properties |= owner.properties(name)
    listed = ", ".join(f"{quote_string(key)} = {quote_string(value)}" for key, value in properties.items())
    place = _location(settings, name)
    session.sql(
        f"CREATE TABLE IF NOT EXISTS {identifier} ({fields}) USING iceberg"
        + (f" LOCATION {quote_string(place)}" if place is not None else "")
        + f" TBLPROPERTIES ({listed})"
    )


def _location(settings: DestinationConfig, name: TableName) -> str | None:
    """Catalogs make a path of the names. One with a slash, a colon or a percent sign would be another path, or none."""
    if _PLAIN_NAME.fullmatch(name.namespace) and _PLAIN_NAME.fullmatch(name.name):
        return None
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", f"{name.namespace}-{name.name}")[:100]
    unique = hashlib.sha256(f"{len(name.namespace)} {name.namespace} {name.name}".encode()).hexdigest()[:12]
    return f"{location(settings)}/.named/{safe}-{unique}"


def renamed_columns(old: TableSchema | None, new: TableSchema) -> dict[str, str]:
    """New name to old name of columns that are the same column (attribute number) under another name."""
    if old is None:
        return {}
    before = {column.attnum: column.name for column in old.columns if column.attnum}
    return {c.name: before[c.attnum] for c in new.columns if before.get(c.attnum, c.name) != c.name}


def evolve(
    session: SparkSession, table: LakeTable, wanted: pa.Schema, renamed: Mapping[str, str], *, rows_are_replaced: bool
) -> bool:
    """Change the table's columns to match, in one metadata commit. Returns whether there was anything to do."""
    current, target = table.columns(), wanted_columns(session.sparkContext._jvm, wanted)
    if list(current.types.items()) == list(target.types.items()):
        return False
    renamed = {new: old for new, old in renamed.items() if old in current and new in target and old not in target}
    promotable = iceberg_classes(session).types.TypeUtil.isPromotionAllowed
    update, changed = table.update_schema(), False
    for name in current:
        if name not in target and name not in renamed.values():
            update, changed = update.deleteColumn(name), True
    for name, text in target.types.items():
        old_name = renamed.get(name, name)
        if old_name not in current:
            update, changed = update.addColumn(None, name, target.java_type(name)), True
            continue
        if old_name != name:
            update, changed = update.renameColumn(old_name, name), True
        if current.types[old_name] == text:
            continue
        changed = True
        old, type = current.java_type(old_name), target.java_type(name)
        if type.isPrimitiveType() and old.isPrimitiveType() and promotable(old, type):
            update = update.updateColumn(old_name, type.asPrimitiveType())
        elif rows_are_replaced:
            update = update.deleteColumn(old_name).addColumn(None, name, type)
        else:
            raise _cannot_follow(table, name, old, type)
    if changed:
        update.commit()
        table.refresh()
    return changed


def _cannot_follow(table: LakeTable, column: str, found: Any, wanted: Any) -> SchemaError:
    return SchemaError(
        f'column "{column}" of lake table {table.identifier} cannot change its type in place',
        detail=f"the lake has {found.toString()}, the source now sends {wanted.toString()}",
        hint=f"Run `headwater resync` for {table.identifier} to copy the table again with the new type.",
        retry=Retry.MANUAL,
    )
