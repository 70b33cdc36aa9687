"""One table of the lake, seen through Iceberg's own Java API in Spark's JVM: snapshots, properties, schema, branches.

Knows no rows and no changes. A handle shows the table as of its last `refresh()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from headwater.destinations.iceberg.watermark import COMMIT_LSN, OPENS_EPOCH, PROPERTIES

MAIN = "main"
_ABSENT = frozenset({"TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND", "NO_SUCH_TABLE"})


def iceberg_classes(session: SparkSession) -> Any:
    """The package org.apache.iceberg of the session's JVM."""
    jvm = session.sparkContext._jvm
    assert jvm is not None
    return jvm.org.apache.iceberg


class LakeTable:
    """A handle on an existing table."""

    def __init__(self, java_table: Any, identifier: str) -> None:
        self._table = java_table
        self.identifier = identifier

    @classmethod
    def load(cls, session: SparkSession, identifier: str) -> LakeTable | None:
        """The table, or None if there is none of that name."""
        loader = iceberg_classes(session).spark.Spark3Util
        try:
            return cls(loader.loadIcebergTable(session._jsparkSession, identifier), identifier)
        except AnalysisException as error:
            if error.getCondition() in _ABSENT:
                return None
            raise

    def refresh(self) -> None:
        self._table.refresh()

    @property
    def snapshot_id(self) -> int | None:
        snapshot = self._table.currentSnapshot()
        return None if snapshot is None else int(snapshot.snapshotId())

    def history(self) -> Iterator[tuple[int, Mapping[str, str]]]:
        """(snapshot id, our part of the summary) of the current snapshot and its ancestors, newest first."""
        snapshot = self._table.currentSnapshot()
        while snapshot is not None:
            summary = snapshot.summary()
            names = PROPERTIES if summary.containsKey(COMMIT_LSN) else (OPENS_EPOCH,)
            yield int(snapshot.snapshotId()), {n: v for n in names if (v := summary.get(n)) is not None}
            parent = snapshot.parentId()
            # An expired parent is not there any more, though its child still names it.
            snapshot = None if parent is None else self._table.snapshot(parent)

    @property
    def may_have_rows(self) -> bool:
        """Whether the current snapshot may hold rows; only a table that surely has none counts as empty."""
        snapshot = self._table.currentSnapshot()
        return snapshot is not None and snapshot.summary().get("total-records") != "0"

    def property(self, name: str) -> str | None:
        value = self._table.properties().get(name)
        return None if value is None else str(value)

    def set_properties(self, wanted: Mapping[str, str]) -> None:
        """One metadata commit, or none if nothing differs."""
        differing = {name: value for name, value in wanted.items() if self.property(name) != value}
        if differing:
            update = self._table.updateProperties()
            for name, value in differing.items():
                update = update.set(name, value)
            update.commit()

    def columns(self) -> dict[str, Any]:
        """Name to Iceberg type, in the table's order."""
        return {field.name(): field.type() for field in self._table.schema().columns()}

    def update_schema(self) -> Any:
        return self._table.updateSchema()

    def create_branch(self, name: str, snapshot_id: int) -> None:
        self._table.manageSnapshots().createBranch(name, snapshot_id).commit()

    def branches(self, prefix: str) -> list[str]:
        return [name for name in self._table.refs() if name.startswith(prefix)]

    def publish_branch(self, name: str) -> None:
        """Make the branch's head the table's, in one commit that fails if the table has moved since the branch was made."""
        self._table.refresh()
        self._table.manageSnapshots().fastForwardBranch(MAIN, name).removeBranch(name).commit()

    def remove_branches(self, names: list[str]) -> None:
        if names:
            manage = self._table.manageSnapshots()
            for name in names:
                manage = manage.removeBranch(name)
            manage.commit()
