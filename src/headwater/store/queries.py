"""Named queries from a .sql file: `-- name: x` opens one, the next such line or the end closes it."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def queries() -> dict[str, bytes]:
    text = resources.files("headwater.store").joinpath("queries.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(text)
    # A percent sign in a comment would be read as a placeholder, so comments go.
    return {
        name: re.sub(r"^\s*--.*$", "", body, flags=re.MULTILINE).strip().encode()
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
