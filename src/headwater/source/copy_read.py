"""Reading copy ranges: a session at the exported snapshot, COPY binary, columns. On an executor or on the driver alike.

Knows no Spark. Every call opens a session of its own, so an attempt that is made again reads the same rows again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from headwater.errors import ConnectionLost, ProtocolError, Retry, ServerError, SourceError
from headwater.schema.table import ColumnSchema, ReplicatedTableSchema
from headwater.source.copy_origin import SERVER_STARTED_AT, CopyOrigin
from headwater.source.copy_plan import CopyPlan, CopyRange
from headwater.source.same_relation import after_reading, before_reading, moved, require_same
from headwater.wire.connection import WireConnection
from headwater.wire.copy_binary import CopyDecoder
from headwater.wire.settings import ConnectSettings

# About 80,000 rows of 8 columns a batch. From 4 to 32 MB it made no difference beyond noise; 1 MB was slower.
CHUNK_BYTES = 8 << 20
_SESSION = {
    # A statement that needs an ACCESS EXCLUSIVE lock waits for the copy's lock, and every new session queues behind it: each
    # range not begun would wait for that statement, and it for us, for ever. Postgres sees no deadlock in that.
    "lock_timeout": "10s",
}
# The relation, its schema or a column of it does not exist any more, or is a kind of relation that our sessions do not read.
_GONE = frozenset({"42P01", "3F000", "42703", "55000", "42809"})


def copy_batches(
    settings: ConnectSettings, snapshot_name: str, plan: CopyPlan, schema: ReplicatedTableSchema
) -> Iterator[pa.RecordBatch]:
    """The whole table on one connection, for destinations without Spark."""
    return read_ranges(CopyOrigin(settings, snapshot_name, plan.server_started_at, schema.columns), plan.ranges)


def read_ranges(
    origin: CopyOrigin, ranges: Iterable[CopyRange], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[pa.RecordBatch]:
    """The ranges one after the other over one session. Closing the iterator ends the session."""
    with open_at_snapshot(origin) as session:
        for copy_range in ranges:
            yield from session.read(origin.columns, copy_range, chunk_bytes=chunk_bytes)


@contextmanager
def open_at_snapshot(origin: CopyOrigin) -> Iterator[CopySession]:
    """A session that sees what the exported snapshot sees."""
    with WireConnection.connect(origin.settings, options=_SESSION) as connection:
        _enter_snapshot(connection, origin)
        yield CopySession(connection)


class CopySession:
    """Reads ranges one after the other, and holds the locks of one relation at a time.

    A read locks the relation and each of its indexes until the transaction ends: ten thousand leaves would take the lock table
    that all sessions of the server share. A savepoint that is rolled back gives its locks back and keeps the snapshot.
    """

    def __init__(self, connection: WireConnection) -> None:
        self._connection = connection
        self._relation: int | None = None
        connection.query("SAVEPOINT one_relation")

    def read(
        self, columns: Sequence[ColumnSchema], copy_range: CopyRange, *, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[pa.RecordBatch]:
        """One range. What it yields is the planned relation's only if it comes to its end."""
        decoder = CopyDecoder(columns)
        self._enter(copy_range)
        try:
            for chunk in self._connection.copy_out(copy_range.sql, chunk_bytes=chunk_bytes):
                batch = decoder.decode(chunk.data)
                if batch is not None:
                    yield batch
        except ServerError as error:
            if error.sqlstate == "55P03":
                raise _wanted(copy_range, error) from error
            if error.sqlstate in _GONE:
                raise moved(copy_range.relation, error.message) from error
            raise
        if not decoder.ended:
            raise ProtocolError(f"COPY of {copy_range.relation} stopped without its trailer")
        self._require_same(copy_range, after_reading(copy_range.relation, copy_range.oid))

    def _enter(self, copy_range: CopyRange) -> None:
        before = before_reading(copy_range.relation, copy_range.oid)
        if self._relation != copy_range.oid:
            before = "ROLLBACK TO SAVEPOINT one_relation; " + before
        self._require_same(copy_range, before)
        self._relation = copy_range.oid

    def _require_same(self, copy_range: CopyRange, query: str) -> None:
        (found,) = self._connection.query(query)
        require_same(copy_range.relation, copy_range.storage, found)


def _enter_snapshot(connection: WireConnection, origin: CopyOrigin) -> None:
    (found,) = connection.query(SERVER_STARTED_AT)
    if found["server_started_at"] != origin.server_started_at:
        # Snapshot names are short and repeat: on another server the same name may be another snapshot.
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
    """The connection that held it was lost; no table is marked failed for that."""
    return ConnectionLost(
        f'exported snapshot "{origin.snapshot_name}" of the server at {origin.settings.address} does not exist any more',
        detail=detail,
        hint="The copy starts again. If this repeats, look in the server's log for what ended the session that held it.",
    )


def _wanted(copy_range: CopyRange, error: ServerError) -> SourceError:
    return SourceError(
        f"copy interrupted: another session is waiting for an ACCESS EXCLUSIVE lock on {copy_range.relation}",
        detail=f"{error.message}; a statement such as ALTER TABLE, TRUNCATE or VACUUM FULL waits for the copy's lock.",
        hint="The copy releases its lock and starts again. Run such statements before or after it, or with a short lock_timeout.",
        retry=Retry.TIMED,
    )
