"""Reading copy ranges: a session at the exported snapshot, COPY binary, columns. On an executor or on the driver alike.

Knows no Spark. Every call opens a session of its own, so an attempt that is made again reads the same rows again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from headwater.errors import ConnectionLost, ProtocolError, Retry, ServerError, SourceError
from headwater.schema.table import ReplicatedTableSchema
from headwater.source.copy_origin import SERVER_STARTED_AT, CopyOrigin
from headwater.source.copy_plan import CopyPlan, CopyRange
from headwater.wire.connection import WireConnection
from headwater.wire.copy_binary import CopyDecoder
from headwater.wire.settings import ConnectSettings

# About 80,000 rows of 8 columns a batch. From 4 to 32 MB it made no difference beyond noise; 1 MB was slower.
CHUNK_BYTES = 8 << 20
_SESSION = {
    # As in ordinary sessions: row filters are printed for this path, and a policy that would hide rows is an error.
    "search_path": "pg_catalog",
    "row_security": "off",
    # A statement that wants the table for itself waits for the copy's lock, and every new session queues behind it: each
    # range not begun would wait for that statement, and it for us, for ever. Postgres sees no deadlock in that.
    "lock_timeout": "10s",
}


def copy_batches(
    settings: ConnectSettings, snapshot_name: str, plan: CopyPlan, schema: ReplicatedTableSchema
) -> Iterator[pa.RecordBatch]:
    """The whole table on one connection, for destinations without Spark."""
    return read_ranges(CopyOrigin(settings, snapshot_name, plan.server_started_at, schema.columns), plan.ranges)


def read_ranges(
    origin: CopyOrigin, ranges: Iterable[CopyRange], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[pa.RecordBatch]:
    """The ranges one after the other over one session. Closing the iterator ends the session."""
    with open_at_snapshot(origin) as connection:
        for copy_range in ranges:
            yield from read_range(connection, origin, copy_range, chunk_bytes=chunk_bytes)


@contextmanager
def open_at_snapshot(origin: CopyOrigin) -> Iterator[WireConnection]:
    """A session that sees what the exported snapshot sees."""
    with WireConnection.connect(origin.settings, options=_SESSION) as connection:
        _enter_snapshot(connection, origin)
        yield connection


def read_range(
    connection: WireConnection, origin: CopyOrigin, copy_range: CopyRange, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[pa.RecordBatch]:
    """One range over a session that is at the snapshot."""
    decoder = CopyDecoder(origin.columns)
    try:
        for chunk in connection.copy_out(copy_range.sql, chunk_bytes=chunk_bytes):
            batch = decoder.decode(chunk.data)
            if batch is not None:
                yield batch
    except ServerError as error:
        if error.sqlstate == "55P03":
            raise _wanted(copy_range, error) from error
        raise
    if not decoder.ended:
        raise ProtocolError(f"COPY of {copy_range.relation} stopped without its trailer")


def _enter_snapshot(connection: WireConnection, origin: CopyOrigin) -> None:
    (found,) = connection.query(SERVER_STARTED_AT)
    if found["server_started_at"] != origin.server_started_at:
        # Snapshot names are short and repeat: on another server the same name may be another moment.
        raise _gone(origin, "The server that answers is not the one that exported it, or has restarted since.")
    name = origin.snapshot_name.replace("'", "''")
    try:
        connection.query(
            f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT '{name}'; "
            # A parallel plan would spend worker processes on what the ranges already divide.
            "SET LOCAL max_parallel_workers_per_gather = 0"
        )
    except ServerError as error:
        if error.sqlstate in ("22023", "42704"):
            raise _gone(origin, error.message) from error
        raise


def _gone(origin: CopyOrigin, detail: str) -> ConnectionLost:
    """The connection that held it was lost, which is no table's error."""
    return ConnectionLost(
        f'exported snapshot "{origin.snapshot_name}" of the server at {origin.settings.address} is gone',
        detail=detail,
        hint="The copy starts again. If this repeats, see the server's log for who ended the session that held it.",
    )


def _wanted(copy_range: CopyRange, error: ServerError) -> SourceError:
    return SourceError(
        f"another session wants {copy_range.relation} for itself while it is copied",
        detail=f"{error.message}; a statement such as ALTER TABLE, TRUNCATE or VACUUM FULL waits for the copy's lock.",
        hint="The copy gives way and starts again. Run such statements before or after it, or with a short lock_timeout.",
        retry=Retry.TIMED,
    )
