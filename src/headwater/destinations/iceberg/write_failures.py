"""Whether a failed write is an error of the lake, which is waited for, or of one table alone (invariant 15).

A table that fails while the lake can be read and written is itself damaged: a data file is missing, for example. The first
failure may have been temporary; after the second in a row the lake is tested, with a file written and removed in the warehouse.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping

from headwater.errors import (
    ChangeRefused,
    DestinationError,
    HeadwaterError,
    LakeTableError,
    LakeTableTaken,
    Retry,
    SchemaError,
    ValueOutOfRange,
    WatermarkError,
)
from headwater.schema.table import TableId

_log = logging.getLogger(__name__)
_JUDGED_AT = 2
# A small file may still find room where a large one does not.
_NO_ROOM = re.compile(r"no space left|disk quota|quota exceeded|SQLITE_FULL|read-only file system", re.IGNORECASE)


def is_the_tables_own(error: HeadwaterError) -> bool:
    """An error that by its nature concerns no other table, and that a second attempt does not repair."""
    if isinstance(error, (ChangeRefused, LakeTableError, LakeTableTaken)):
        return True
    return isinstance(error, (WatermarkError, SchemaError, ValueOutOfRange)) and error.retry is not Retry.TIMED


class WriteFailures:
    """Failures in a row, by table. `lake_works` is asked only when a table fails again."""

    def __init__(self, lake_works: Callable[[TableId], bool]) -> None:
        self._lake_works = lake_works
        self._lock = threading.Lock()
        self._in_a_row: dict[TableId, int] = {}

    def written(self, tables: Iterable[TableId]) -> None:
        with self._lock:
            for table in tables:
                self._in_a_row.pop(table, None)

    def judged(
        self, failed: Mapping[TableId, HeadwaterError], names: Mapping[TableId, str]
    ) -> dict[TableId, HeadwaterError]:
        """The tables' own errors. An error that concerns the lake is raised, and then the whole batch is retried."""
        own = {table: self._judge(table, error, names[table]) for table, error in failed.items()}
        for error in own.values():
            if not is_the_tables_own(error):
                raise error
        return own

    def _judge(self, table: TableId, error: HeadwaterError, name: str) -> HeadwaterError:
        if is_the_tables_own(error) or not isinstance(error, DestinationError):
            return error
        with self._lock:
            self._in_a_row[table] = count = self._in_a_row.get(table, 0) + 1
        if count < _JUDGED_AT or _NO_ROOM.search(str(error)) or not self._lake_works(table):
            return error
        with self._lock:
            self._in_a_row.pop(table, None)
        return LakeTableError(
            f"lake table {name} cannot be written, while the lake itself can",
            detail=error.detail or error.message,
            hint="The table is copied again. If that fails too, drop the lake table and copy it once more: `headwater resync`.",
        )
