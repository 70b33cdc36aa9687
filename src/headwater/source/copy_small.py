"""Reading several small tables over one session, each whole and within a budget of memory.

An error of one table is the outcome of that table alone (invariant 15): the next one gets a new session. A table that is larger
than was estimated is not read to its end; the caller reads it in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headwater.errors import HeadwaterError, SourceError, said_by
from headwater.schema.table import TableId
from headwater.source.copy_plan import SmallTable
from headwater.source.copy_read import CopySession, open_at_snapshot


@dataclass(frozen=True, slots=True)
class SmallRead:
    """The outcome for a table: its rows as an Arrow IPC stream, or an error, or neither if it did not fit."""

    id: TableId
    rows: Any = None
    """An Arrow buffer; pyarrow ships no type for it."""
    error: HeadwaterError | None = None


def read_small_tables(tables: Sequence[SmallTable], budget_bytes: int) -> Iterator[SmallRead]:
    """Every table's outcome, in order; all rows together stay within the budget and one chunk of COPY more."""
    left = budget_bytes
    with ExitStack() as held:
        session: CopySession | None = None
        for table in tables:
            if left <= 0:
                yield SmallRead(table.id)
                continue
            try:
                if session is None:
                    session = held.enter_context(open_at_snapshot(table.origin))
                rows = _read(session, table, left)
            except Exception as error:
                # In the middle of a COPY there is no other way back than a new session.
                held.close()
                session = None
                yield SmallRead(table.id, error=_explained(table, error))
                continue
            if rows is None:
                held.close()
                session = None
                yield SmallRead(table.id)
                continue
            left -= rows.size
            yield SmallRead(table.id, rows)


def _read(session: CopySession, table: SmallTable, most_bytes: int) -> pa.Buffer | None:
    """The table as an Arrow IPC stream; None once it is larger than allowed."""
    sink = pa.BufferOutputStream()
    writer = None
    for copy_range in table.ranges:
        for batch in session.read(table.origin.columns, copy_range):
            if sink.tell() + batch.nbytes > most_bytes:
                return None
            if writer is None:
                writer = pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
    if writer is not None:
        writer.close()
    return sink.getvalue()


def _explained(table: SmallTable, error: Exception) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        return error
    return SourceError(
        f"reading {table.ranges[0].relation if table.ranges else table.id} failed",
        detail=said_by(error),
        hint="This is a defect of Headwater; report it with the log. The table is not copied.",
    )
