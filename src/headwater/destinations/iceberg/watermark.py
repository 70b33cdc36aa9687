"""The watermark inside each lake commit: how it is written, found again, and compared with what the store recorded.

Keeps invariant 5. The search is pure: it reads the summaries of the current lake snapshot and its ancestors, nearest first,
and ends at the commit that opened the epoch, so that an older copy's higher position never hides new changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headwater.contracts.metadata import Watermark
from headwater.errors import ProtocolError, WatermarkError
from headwater.events import ChangeRun, Step, TruncateStep
from headwater.lsn import CommitLsn

PIPELINE_ID = "headwater.pipeline-id"
SYSTEM_IDENTIFIER = "headwater.system-identifier"
EPOCH = "headwater.epoch"
COMMIT_LSN = "headwater.commit-lsn"
ORDINAL = "headwater.ordinal"
OPENS_EPOCH = "headwater.opens-epoch"
DATABASE_OID = "headwater.database-oid"
TABLE_OID = "headwater.source-oid"
TIMELINE = "headwater.timeline"
RUN = "headwater.run"
ATTEMPT = "headwater.attempt"
"""Names one try at a commit, so that a late one of an earlier try is not taken for it."""

# As session settings they outlive a statement, so each commit sets all of them.
PROPERTIES = (
    PIPELINE_ID,
    SYSTEM_IDENTIFIER,
    EPOCH,
    COMMIT_LSN,
    ORDINAL,
    OPENS_EPOCH,
    DATABASE_OID,
    TABLE_OID,
    TIMELINE,
    RUN,
    ATTEMPT,
)


def snapshot_properties(mark: Watermark, *, opens_epoch: bool = False) -> dict[str, str]:
    """What goes into the summary of the lake snapshot that contains everything up to `mark`."""
    return {
        PIPELINE_ID: str(mark.pipeline_id),
        SYSTEM_IDENTIFIER: mark.system_identifier,
        EPOCH: mark.epoch,
        COMMIT_LSN: str(mark.commit_lsn),
        ORDINAL: str(mark.ordinal),
        OPENS_EPOCH: "true" if opens_epoch else "false",
        DATABASE_OID: str(mark.database_oid),
        TABLE_OID: str(mark.table_id),
        TIMELINE: str(mark.timeline),
        RUN: mark.run,
    }


def parse_summary(summary: Mapping[str, str]) -> Watermark | None:
    """The watermark of one lake snapshot; None for one that is not ours, or that lost a part of it."""
    if COMMIT_LSN not in summary:
        return None
    try:
        return Watermark(
            int(summary[PIPELINE_ID]),
            summary[SYSTEM_IDENTIFIER],
            summary[EPOCH],
            CommitLsn.parse(summary[COMMIT_LSN]),
            int(summary[ORDINAL]),
            int(summary.get(DATABASE_OID, 0)),
            int(summary.get(TABLE_OID, 0)),
            int(summary.get(TIMELINE, 0)),
            summary.get(RUN, ""),
        )
    except (KeyError, ValueError, ProtocolError):
        return None


def find_watermark(history: Iterable[tuple[int, Mapping[str, str]]]) -> Watermark | None:
    """The nearest watermark in (snapshot id, summary) pairs, newest first; commits of maintenance may have none."""
    for _, summary in history:
        mark = parse_summary(summary)
        if mark is not None:
            return mark
        if summary.get(OPENS_EPOCH) == "true":
            return None
    return None


def check_lineage(
    table: str, found: Watermark | None, recorded: Watermark | None, timeline: int | None = None
) -> Watermark:
    """The lake's watermark, if it continues what the store recorded. A lake that is ahead is normal after a crash.

    `timeline` is the source's: positions of an older one are its past, those of a newer one are another server's.
    """
    if recorded is None:
        raise WatermarkError(
            f"no copy of table {table} is recorded",
            detail="changes can only be applied on top of a copy that this pipeline made and recorded",
            hint=_hint(table),
        )
    if found is None:
        raise WatermarkError(
            f"lake table {table} has no watermark",
            detail=f"the store recorded {_text(recorded)}",
            hint=_hint(table),
        )
    if not _same_lineage(found, recorded):
        raise WatermarkError(
            f"lake table {table} belongs to another copy than the recorded one",
            detail=f"the lake has {_text(found)}; the store recorded {_text(recorded)}",
            hint=_hint(table),
        )
    if not found.covers(recorded.commit_lsn, recorded.ordinal):
        raise WatermarkError(
            f"lake table {table} is behind the recorded position",
            detail=f"the lake has {_text(found)}; the store recorded {_text(recorded)}",
            hint=f"If the table was rolled back or restored on purpose: {_hint(table)}",
        )
    if timeline is not None and found.timeline > timeline:
        raise WatermarkError(
            f"lake table {table} was written from a newer timeline of the source",
            detail=f"the lake has {_text(found)}; the source is on timeline {timeline}",
            hint=f"If the source was restored to an earlier time on purpose: {_hint(table)}",
        )
    return found


def not_covered(run: ChangeRun, mark: Watermark) -> npt.NDArray[np.bool_]:
    """Which changes of a run lie after the watermark."""
    lsn = np.uint64(mark.commit_lsn.value)
    later: npt.NDArray[np.bool_] = (run.commit_lsn > lsn) | ((run.commit_lsn == lsn) & (run.ordinal > mark.ordinal))
    return later


def steps_after(steps: Iterable[Step], mark: Watermark) -> list[Step]:
    """The steps less what the watermark covers, and less everything that a later truncate makes void."""
    kept: list[Step] = []
    for step in steps:
        if isinstance(step, TruncateStep):
            if not mark.covers(step.commit_lsn, step.ordinal):
                kept = [step]
            continue
        later = not_covered(step, mark)
        if later.all() and len(step):
            kept.append(step)
        elif later.any():
            kept.append(step.filter(later))
    return kept


def mark_of(step: Step, lineage: Watermark) -> Watermark:
    """The watermark of a step's last change."""
    if isinstance(step, TruncateStep):
        lsn, ordinal = step.commit_lsn, step.ordinal
    else:
        lsn, ordinal = CommitLsn(int(step.commit_lsn[-1])), int(step.ordinal[-1])
    return replace(lineage, commit_lsn=lsn, ordinal=ordinal)


def _same_lineage(one: Watermark, other: Watermark) -> bool:
    # Marks of earlier versions say nothing of database and table.
    known = (one.database_oid == other.database_oid or 0 in (one.database_oid, other.database_oid)) and (
        one.table_id == other.table_id or 0 in (one.table_id, other.table_id)
    )
    names = ("pipeline_id", "system_identifier", "epoch")
    return known and all(getattr(one, name) == getattr(other, name) for name in names)


def _text(mark: Watermark) -> str:
    return (
        f"position {mark.commit_lsn} ordinal {mark.ordinal}, epoch {mark.epoch}, pipeline {mark.pipeline_id}, "
        f"system {mark.system_identifier}, database {mark.database_oid}, table {mark.table_id}, timeline {mark.timeline}"
    )


def _hint(table: str) -> str:
    return f"Run `headwater resync` for {table} to copy the table again."
