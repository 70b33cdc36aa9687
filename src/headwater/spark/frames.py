"""How Arrow rows of the driver reach Spark: in the task itself if they are few, through a spool directory if not.

The frame has exactly the declared types; left to itself Spark makes instants of timestamps without a zone.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from headwater.private_files import new_file, own_directory

SPOOL_FROM_BYTES = 512 << 10
"""Rows in the task against rows by Parquet, two cores: 100 rows 0.16 and 0.38 s, 10,000 (0.6 MB) 0.4 and 0.25 s,
500,000 (31 MB) 3.5 and 0.9 s."""
_GROUP_ROWS = 128 << 10


class FrameSpool:
    """A directory that driver and executors both see, of one run of one pipeline only: files in it at start are left over."""

    def __init__(self, location: str) -> None:
        self._location = location.rstrip("/")
        self._is_local = "://" not in location
        if self._is_local:
            self._files, self._path = pafs.LocalFileSystem(), os.path.abspath(self._location)
        else:
            self._files, self._path = pafs.FileSystem.from_uri(self._location)

    def sweep(self) -> None:
        """Remove what an earlier run left; once at start, when no other run can use it."""
        if self._is_local:
            self._make_directory()  # whose it is, before anything in it is removed
        if self._files.get_file_info(self._path).type != pafs.FileType.NotFound:
            self._files.delete_dir_contents(self._path)

    def disk(self) -> Path:
        """A directory of this machine for files that only the driver reads: the spool itself, where it is local."""
        if not self._is_local:
            return Path(tempfile.gettempdir())
        self._make_directory()
        return Path(self._path)

    @contextmanager
    def frame(self, session: SparkSession, table: pa.Table, schema: StructType) -> Iterator[DataFrame]:
        """The rows as a frame that may be read until the block ends."""
        if table.nbytes < SPOOL_FROM_BYTES:
            yield session.createDataFrame(table, schema)
            return
        # A run that lost its lock may still write here: what one run writes is never read as the other's.
        name = f"{uuid.uuid4().hex}.parquet"
        path = f"{self._path}/{name}"
        self._make_directory()
        try:
            self._write(table, path)
            # An absolute path without a scheme would be the cluster's default file system, not this disk.
            uri = f"file://{path}" if self._is_local else f"{self._location}/{name}"
            yield session.read.schema(schema).parquet(uri)
        finally:
            with suppress(OSError):
                self._files.delete_file(path)

    def _write(self, table: pa.Table, path: str) -> None:
        if not self._is_local:
            pq.write_table(table, path, filesystem=self._files, compression="none", row_group_size=_GROUP_ROWS)
            return
        with os.fdopen(new_file(Path(path)), "wb") as file:
            pq.write_table(table, file, compression="none", row_group_size=_GROUP_ROWS)

    def _make_directory(self) -> None:
        if self._is_local:
            # Rows of the source are here for a moment: no other user may read them.
            own_directory(Path(self._path))
        else:
            self._files.create_dir(self._path, recursive=True)
