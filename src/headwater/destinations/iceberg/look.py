"""What the lake has of a table when a run begins, compared with what the store recorded."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.contracts.metadata import DestinationTableMetadata, Watermark
from headwater.destinations.iceberg.owner import Owner, check_for_changes
from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.watermark import check_lineage, find_watermark
from headwater.errors import HeadwaterError, WatermarkError


@dataclass(frozen=True, slots=True)
class LakeLook:
    """Nothing at all: the store has no record of a copy."""

    mark: Watermark | None = None
    is_recorded_copy: bool = False
    error: HeadwaterError | None = None


def look_at(table: LakeTable | None, metadata: DestinationTableMetadata, mine: Owner, timeline: int | None) -> LakeLook:
    identifier, recorded = metadata.destination_table_id, metadata.watermark
    if table is None:
        return LakeLook(error=table_is_gone(identifier, identifier))
    mark = find_watermark(table.history())
    same_copy = mark is not None and recorded is not None and mark.epoch == recorded.epoch
    try:
        check_for_changes(table, mine, identifier)
        check_lineage(identifier, mark, recorded, timeline)
    except HeadwaterError as error:
        return LakeLook(mark, same_copy, error)
    return LakeLook(mark, same_copy)


def table_is_gone(name: str, identifier: str) -> WatermarkError:
    return WatermarkError(
        f"lake table {name} does not exist any more",
        detail=f"the store recorded it as {identifier}",
        hint=f"Run `headwater resync` for {name} to copy the table again.",
    )
