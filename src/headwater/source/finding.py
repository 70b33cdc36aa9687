"""What the check of the source before a start may find: an error stops the start, a warning is only shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    message: str
    detail: str
    hint: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}\n  detail: {self.detail}\n  hint: {self.hint}"


def error(message: str, detail: str, hint: str) -> Finding:
    return Finding(Severity.ERROR, message, detail, hint)


def warning(message: str, detail: str, hint: str) -> Finding:
    return Finding(Severity.WARNING, message, detail, hint)
