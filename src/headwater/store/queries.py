"""Named queries from a .sql file: `-- name: x` opens one, the next such line or the end closes it.

`:run` and `:ours` in a statement stand for the two halves of its fence, see the file.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_FENCE = {
    ":run": "run AS (SELECT FROM headwater.runs WHERE pipeline_id = %(pipeline)s AND token = %(token)s FOR SHARE)",
    ":ours": "(%(token)s::text IS NULL OR EXISTS (TABLE run))",
}
_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def queries() -> dict[str, bytes]:
    text = resources.files("headwater.store").joinpath("queries.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(text)
    # A percent sign in a comment would be read as a placeholder, so comments go.
    return {
        name: _fenced(re.sub(r"^\s*--.*$", "", body, flags=re.MULTILINE).strip()).encode()
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


@cache
def writes(name: str) -> bool:
    """Whether the query is one that another run's token refuses."""
    return b"EXISTS (TABLE run)" in queries()[name]


def _fenced(body: str) -> str:
    for mark, fence in _FENCE.items():
        body = body.replace(mark, fence)
    return body
