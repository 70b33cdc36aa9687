"""What connects a source table with its object in the destination: kept by the store, made by the destination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from headwater.lsn import CommitLsn, EndLsn
from headwater.schema.table import SnapshotId


class SchemaStatus(StrEnum):
    APPLYING = "applying"
    APPLIED = "applied"


@dataclass(frozen=True, slots=True)
class Watermark:
    """The last change a lake commit contains: (commit LSN, ordinal), within one copy epoch of one lineage.

    A copy's own watermark is the slot's consistent point with ordinal -1: everything before it is in the rows.
    """

    pipeline_id: int
    system_identifier: str
    epoch: str
    commit_lsn: CommitLsn
    ordinal: int
    database_oid: int = 0
    table_id: int = 0
    timeline: int = 0
    """0 in these three: written by a version that did not record them."""
    run: str = field(default="", compare=False)
    """The token of the run that committed it. Says who wrote, not what the table contains."""

    @property
    def position(self) -> EndLsn:
        """The position just past it. A commit LSN is the start of a record; of a copy, everything before its LSN is in."""
        return EndLsn(self.commit_lsn.value + (1 if self.ordinal >= 0 else 0))

    def covers(self, commit_lsn: CommitLsn, ordinal: int) -> bool:
        return (commit_lsn.value, ordinal) <= (self.commit_lsn.value, self.ordinal)


@dataclass(frozen=True, slots=True)
class DestinationTableMetadata:
    """Connects a source table with its object in the destination."""

    destination_table_id: str
    snapshot_id: SnapshotId
    replication_mask: tuple[bool, ...]
    schema_status: SchemaStatus = SchemaStatus.APPLYING
    watermark: Watermark | None = None
    """The last one this pipeline saw committed; a lake that shows less has lost data (invariant 5)."""

    def applied(self) -> DestinationTableMetadata:
        return replace(self, schema_status=SchemaStatus.APPLIED)


AppliedDestinationTableMetadata = DestinationTableMetadata


def metadata_to_json(metadata: DestinationTableMetadata) -> dict[str, Any]:
    mark = metadata.watermark
    return {
        "destination_table_id": metadata.destination_table_id,
        "snapshot_id": metadata.snapshot_id,
        "replication_mask": list(metadata.replication_mask),
        "schema_status": metadata.schema_status.value,
        "watermark": None
        if mark is None
        else {
            "pipeline_id": mark.pipeline_id,
            "system_identifier": mark.system_identifier,
            "epoch": mark.epoch,
            "commit_lsn": str(mark.commit_lsn),
            "ordinal": mark.ordinal,
            "database_oid": mark.database_oid,
            "table_id": mark.table_id,
            "timeline": mark.timeline,
            "run": mark.run,
        },
    }


def metadata_from_json(value: Mapping[str, Any]) -> DestinationTableMetadata:
    mark = value.get("watermark")
    return DestinationTableMetadata(
        destination_table_id=value["destination_table_id"],
        snapshot_id=SnapshotId(value["snapshot_id"]),
        replication_mask=tuple(value["replication_mask"]),
        schema_status=SchemaStatus(value["schema_status"]),
        watermark=None
        if mark is None
        else Watermark(
            mark["pipeline_id"],
            mark["system_identifier"],
            mark["epoch"],
            CommitLsn.parse(mark["commit_lsn"]),
            mark["ordinal"],
            mark.get("database_oid", 0),
            mark.get("table_id", 0),
            mark.get("timeline", 0),
            mark.get("run", ""),
        ),
    )
