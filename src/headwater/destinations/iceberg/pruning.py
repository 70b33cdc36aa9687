"""A predicate on the key that every row of a batch fulfils, so that a MERGE reads and shuffles only what can match.

MERGE keeps the batch's unmatched rows, so Spark joins by shuffling the whole target. A predicate that follows from the
equality changes no result; files without such keys are not read, and other rows leave the plan before the shuffle. It also
becomes the filter of the conflict check: a commit in between that touches keys of this batch, which is what a late attempt
of our own would do, still fails validation.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from headwater.destinations.iceberg.types import quote

MAX_LISTED_KEYS = 200
"""What Iceberg compares with a file's bounds one by one; longer lists prune no files."""


def key_predicate(rows: pa.Table, key: tuple[str, ...]) -> str:
    """`AND t.k IN (...)` or `AND t.k BETWEEN ...` per integer column of the key; empty for other types."""
    return "".join(_column_predicate(quote(name), rows.column(name)) for name in key if _is_integer(rows, name))


def _is_integer(rows: pa.Table, name: str) -> bool:
    return bool(pa.types.is_integer(rows.schema.field(name).type)) and rows.num_rows > 0


def _column_predicate(name: str, values: pa.ChunkedArray) -> str:
    if len(values) <= MAX_LISTED_KEYS:
        listed = ", ".join(str(value) for value in sorted(set(values.to_pylist())))
        return f" AND t.{name} IN ({listed})"
    bounds = pc.min_max(values).as_py()
    return f" AND t.{name} BETWEEN {bounds['min']} AND {bounds['max']}"
