"""What an error during a lake commit says about the commit: done, failed or unknown (invariant 6)."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any


class CommitOutcome(StrEnum):
    FAILED = "failed"
    UNKNOWN = "unknown"


class LakeTableMoved(Exception):
    """Another commit came between the look at the table and ours, which is therefore not published."""


def outcome_of(error: BaseException) -> CommitOutcome:
    """Failed only where Iceberg says so; a JDBC catalog's SQL errors, lost answers and all else are unknown."""
    if isinstance(error, LakeTableMoved):
        return CommitOutcome.FAILED
    names = list(java_classes(error))
    if any(name.endswith(".CommitStateUnknownException") for name in names):
        return CommitOutcome.UNKNOWN
    failed = any(name.endswith((".ValidationException", ".CommitFailedException")) for name in names)
    return CommitOutcome.FAILED if failed else CommitOutcome.UNKNOWN


def java_classes(error: BaseException) -> Iterator[str]:
    """The Java classes of an error and its causes, outermost first; none for an error of Python."""
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    for _ in range(20):
        if java is None:
            return
        yield str(java.getClass().getName())
        java = java.getCause()
