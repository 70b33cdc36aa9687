"""Where a stream's bytes and columns go when they would not fit into memory: files that only we can see.

A transaction larger than the budget goes to disk as it arrives (invariant 4). The files have no name from the moment they
are open, so nothing is left behind, whatever ends the process; what is mapped from them is memory the system may take back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from headwater.wire.columns import Bytes


class Spool:
    """Hands out memory that lies in a directory's file system."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.spilled_bytes = 0
        """How much went to disk in all, for whoever shows it."""

    def buffer(self, size: int) -> Bytes:
        """Writable bytes in a file."""
        with tempfile.TemporaryFile(dir=self._directory, prefix="headwater-") as file:
            file.truncate(size)
            self.spilled_bytes += size
            return np.memmap(file, np.uint8, "r+", shape=(size,))

    def table(self, table: pa.Table) -> pa.Table:
        """The same table, read from a file."""
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix="headwater-", suffix=".arrow") as file:
            with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            self.spilled_bytes += Path(file.name).stat().st_size
            return pa.ipc.open_file(pa.memory_map(file.name)).read_all()
