"""Names and values inside the commands we send as text."""

from __future__ import annotations

import re


def slot_named_in(command: str) -> str | None:
    found = re.match(r"\s*(?:CREATE|DROP|ALTER)_REPLICATION_SLOT\s+(?:\"([^\"]+)\"|(\w+))", command, re.IGNORECASE)
    return (found[1] or found[2]) if found else None


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
