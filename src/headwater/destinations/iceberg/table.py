"""One table of the lake, through Iceberg's own Java API in Spark's JVM: snapshots, properties, schema, branches.

Does not handle rows or changes. A handle shows the table as of its last `refresh()`.

Rows are written to a branch first and published from there: in one commit the table gets the branch's head, and a tag keeps that
snapshot, which carries the watermark, from being expired by others (invariants 6 and 20).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from headwater.destinations.iceberg.columns import LakeColumns, columns_of
from headwater.destinations.iceberg.outcome import LakeTableMoved, java_classes
from headwater.destinations.iceberg.watermark import ATTEMPT, COMMIT_LSN, OPENS_EPOCH, PROPERTIES

MAIN = "main"
PROBED = "headwater.probed"
STAGING = "headwater_staging"
"""The branch that a batch is written to. It stays, at the last published snapshot: making it again would be a commit more."""
WATERMARK_TAG = "headwater_watermark"
_FOR_EVER = 2**63 - 1
_ABSENT = frozenset({"TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND", "NO_SUCH_TABLE"})


def iceberg_classes(session: SparkSession) -> Any:
    """The package org.apache.iceberg of the session's JVM."""
    jvm = session.sparkContext._jvm
    assert jvm is not None
    return jvm.org.apache.iceberg


@dataclass(frozen=True, slots=True)
class Published:
    """A commit that is the table's now."""

    snapshot_id: int
    gained_rows: int | None
    """How many rows the table has more than before; None where its snapshots do not say."""


class LakeTable:
    """A handle on an existing table."""

    def __init__(self, java_table: Any, identifier: str, iceberg: Any) -> None:
        self._table = java_table
        self.identifier = identifier
        self._iceberg = iceberg

    @classmethod
    def load(cls, session: SparkSession, identifier: str) -> LakeTable | None:
        """The table, or None if there is none of that name."""
        iceberg = iceberg_classes(session)
        try:
            table = iceberg.spark.Spark3Util.loadIcebergTable(session._jsparkSession, identifier)
            return cls(table, identifier, iceberg)
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
        """(snapshot id, our part of the summary) of the current snapshot and its ancestors, newest first.

        Ancestors that were expired are looked up in earlier metadata files, as long as the table keeps those: several
        commits of maintenance and an expiry cut the line to our last commit, and its tag alone does not show whether the
        table still descends from it or was rolled back before.
        """
        snapshot = self._table.currentSnapshot()
        earlier = _EarlierMetadata(self._table, self._iceberg.TableMetadataParser)
        while snapshot is not None:
            summary = snapshot.summary()
            names = PROPERTIES if summary.containsKey(COMMIT_LSN) else (OPENS_EPOCH,)
            yield int(snapshot.snapshotId()), {n: v for n in names if (v := summary.get(n)) is not None}
            parent = snapshot.parentId()
            if parent is None:
                return
            snapshot = self._table.snapshot(parent) or earlier.snapshot(parent)

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

    def columns(self) -> LakeColumns:
        """As of the last refresh, but fetched at each call: call once and keep the answer."""
        return columns_of(self._iceberg, self._table.schema())

    def ensure_snapshot(self) -> None:
        """An empty first one, where there is none: without it a late commit of a dead attempt would have nothing to be
        validated against, and an empty copy that came before it holds no file that it conflicts with."""
        if self.snapshot_id is None:
            self._table.newFastAppend().commit()
            self._table.refresh()

    def update_schema(self) -> Any:
        return self._table.updateSchema()

    def set_comments(self, wanted: Mapping[str, str]) -> None:
        """What columns say of themselves: one metadata commit, or none if nothing differs."""
        schema = self._table.schema()
        differing = {name: comment for name, comment in wanted.items() if schema.findField(name).doc() != comment}
        if differing:
            update = self._table.updateSchema()
            for name, comment in differing.items():
                update = update.updateColumnDoc(name, comment)
            update.commit()

    def write_probe(self) -> None:
        """Write and remove a small file where this table's data files go, then commit to the catalog; raises if that fails."""
        file = self._table.locationProvider().newDataLocation(f"headwater-probe-{uuid.uuid4().hex}")
        stream = self._table.io().newOutputFile(file).createOrOverwrite()
        try:
            stream.write(bytearray(b"headwater"))
        finally:
            stream.close()
            self._table.io().deleteFile(file)
        self.set_properties({PROBED: uuid.uuid4().hex})

    def data_files(self) -> list[tuple[str, str]]:
        """Path and partition of each, of a table that is partitioned by a text."""
        found, tasks = [], self._table.newScan().planFiles().iterator()
        while tasks.hasNext():
            file = tasks.next().file()
            found.append((str(file.location()), _partition_text(file)))
        tasks.close()
        return found

    def read_file(self, path: str) -> bytes | None:
        """None if the driver does not see it."""
        file = self._table.io().newInputFile(path)
        if not file.exists():
            return None
        stream = file.newStream()
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    def add_data_file(self, parquet: bytes, partition: str) -> None:
        """A file of one row, written by the driver."""
        path = self._table.locationProvider().newDataLocation(f"driver-{uuid.uuid4().hex}.parquet")
        stream = self._table.io().newOutputFile(path).create()
        try:
            stream.write(bytearray(parquet))
        finally:
            stream.close()
        file = self._iceberg.DataFiles.builder(self._table.spec()).withPath(path).withFormat("PARQUET")
        file = file.withFileSizeInBytes(len(parquet)).withRecordCount(1).withPartitionPath(partition).build()
        self._table.newFastAppend().appendFile(file).commit()

    def stage(self, start: int) -> str:
        """Put the staging branch at the snapshot that was looked at, and return its name in SQL.

        Usually it is there already. What is read from it and written to it starts from that snapshot, whatever others
        commit meanwhile; and unlike a snapshot it is read with the table's present columns.
        """
        refs = self._table.refs()
        branch = refs.get(STAGING)
        if branch is None or int(branch.snapshotId()) != start:
            manage = self._table.manageSnapshots()
            for name in [name for name in refs if name.startswith(f"{STAGING}_")]:
                manage = manage.removeBranch(name)  # one a write, of versions before
            make = manage.createBranch if branch is None else manage.replaceBranch
            make(STAGING, start).commit()
        return f"{self.identifier}.`branch_{STAGING}`"

    def publish(self, start: int, attempt: str, *, replaces_all: bool = False) -> Published:
        """Make the staged commit of this attempt the table's, tagged, in one commit.

        Only if the table still is at `start`, and nothing but this attempt was written on top of it: a late commit of a
        dead attempt fails here. Where all rows are replaced, commits in between that carry no watermark do not matter.
        """
        self._table.refresh()
        head = self._table.refs().get(STAGING)
        staged = None if head is None else self._table.snapshot(head.snapshotId())
        if staged is None or staged.parentId() != start or staged.summary().get(ATTEMPT) != attempt:
            raise LakeTableMoved(f"the staging branch of {self.identifier} has a commit of another attempt")
        if self.snapshot_id != start and not (replaces_all and self._only_unmarked_since(start)):
            raise LakeTableMoved(f"{self.identifier} has a commit that came after it was looked at")
        # Not validated again by Iceberg, and not retried on top of a newer commit: it says what the refs must be.
        manage = self._table.manageSnapshots().replaceBranch(MAIN, staged.snapshotId())
        self._tagged(manage, staged.snapshotId()).commit()
        before, after = _live_rows(self._table.snapshot(start)), _live_rows(staged)
        gained = None if before is None or after is None else after - before
        return Published(int(staged.snapshotId()), gained)

    def _tagged(self, manage: Any, snapshot_id: int) -> Any:
        if self._table.refs().get(WATERMARK_TAG) is not None:
            return manage.replaceTag(WATERMARK_TAG, snapshot_id)
        # A table's own `history.expire.max-ref-age-ms` does not count for a ref that says its age.
        return manage.createTag(WATERMARK_TAG, snapshot_id).setMaxRefAgeMs(WATERMARK_TAG, _FOR_EVER)

    def _only_unmarked_since(self, start: int) -> bool:
        for snapshot_id, summary in self.history():
            if snapshot_id == start:
                return True
            if COMMIT_LSN in summary:
                return False
        return False


class _EarlierMetadata:
    """Snapshots that the table no longer has, in the metadata files before the current one. Read only when asked."""

    def __init__(self, java_table: Any, parser: Any) -> None:
        self._table = java_table
        self._parser = parser
        self._read: list[Any] = []
        self._unread: list[str] | None = None

    def snapshot(self, snapshot_id: int) -> Any:
        if self._unread is None:
            # Oldest first, and so read from the end.
            self._unread = [str(entry.file()) for entry in self._table.operations().current().previousFiles()]
        found = next((s for m in self._read if (s := m.snapshot(snapshot_id)) is not None), None)
        while found is None and self._unread:
            metadata = self._metadata(self._unread.pop())
            if metadata is not None:
                self._read.append(metadata)
                found = metadata.snapshot(snapshot_id)
        return found

    def _metadata(self, file: str) -> Any:
        try:
            return self._parser.read(self._table.io(), file)
        except Exception as error:
            if any(name.endswith(".NotFoundException") for name in java_classes(error)):
                return None
            raise


def _partition_text(file: Any) -> str:
    partition = file.partition()
    return str(partition.get(0, partition.getClass().forName("java.lang.Object")))


def _live_rows(snapshot: Any) -> int | None:
    """By the snapshot's own totals: they may be off after a compaction of v2 tables, but by the same in parent and child."""
    if snapshot is None:
        return None
    records, deletes = (snapshot.summary().get(name) for name in ("total-records", "total-position-deletes"))
    return None if records is None else int(records) - int(deletes or 0)
