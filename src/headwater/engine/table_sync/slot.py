"""A table sync worker's slot: made under the tables' lock, with the exported snapshot that all its copies are read at.

It is followed through the loss of its connection: a copy that is complete outlives it. The slot keeps what was not confirmed, so
a new connection goes on from there. Only a slot that is gone, or another server, makes the copy worthless.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from headwater.engine.follow.slot_stream import SlotStream, SlotStreams
from headwater.engine.follow.slot_watch import SlotWatch
from headwater.engine.run_guard import RunGuard
from headwater.engine.source import Source
from headwater.engine.wake_up import WakeUp
from headwater.errors import HeadwaterError, Retry, SlotError, StartAgain
from headwater.limits import naming_limits
from headwater.lsn import EndLsn
from headwater.schema.table import TableId, quote_identifier
from headwater.source.server import flush_lsn
from headwater.source.session import Connection, connect
from headwater.source.slot_errors import standby_behind
from headwater.source.table_lock import TableLock, taken_tables
from headwater.source.timeline import current_timeline, server_history
from headwater.wire.connection import WireConnection


class CopyInterrupted(StartAgain):
    """Another session waits for a lock on the table, and waits for us, or we for it: it goes first."""

    def __init__(self, what: str, suspects: Collection[TableId]) -> None:
        super().__init__(
            f"copy of {what} interrupted: another session is waiting for an ACCESS EXCLUSIVE lock",
            detail="that session waited for the lock of the copy, and the copy waited for that session",
            hint="Nothing is to be done: the statement runs first, and the copy starts again after it.",
        )
        self.suspects = frozenset(suspects)
        """The tables that are wanted, as far as that could be seen."""


class TimelineChangedMeanwhile(StartAgain):
    """The copy is of a server that the apply worker has left, or does not follow yet: their positions are not the same."""


class SlotLostMeanwhile(StartAgain):
    """What was committed since the copy cannot be read any more."""


class SyncSlot:
    """Used by the worker's thread. `close` ends whatever of it is open, but no stream."""

    def __init__(
        self,
        source: Source,
        guard: RunGuard,
        wake_up: WakeUp,
        what: str,
        name: str,
        connection: WireConnection,
        start: EndLsn,
        exported_snapshot: str,
        timeline: int,
    ) -> None:
        self.name = name
        self.start = start
        self.exported_snapshot = exported_snapshot
        self._source = source
        self._settings = source.named(name)
        self._guard = guard
        self._what = what
        self._first: WireConnection | None = connection
        """The connection that the slot was made with, until it is followed."""
        self._timeline = timeline
        """Of the server that the slot is on, which may be another one than the apply worker's after a promotion."""
        self._streams = SlotStreams(source, name, guard.lock, wake_up)
        self._admin: Connection | None = None

    def close(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.close()
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()

    def open(self, start: EndLsn, *, binary: bool) -> SlotStream:
        """The first time over the connection that the slot was made with, which ends the exported snapshot."""
        first, self._first = self._first, None
        connection = first
        if connection is None:
            self.close()
            self._guard.require_lock()
            connection = WireConnection.connect(self._settings, replication=True)
        try:
            if first is None:
                self._check(connection, start)
            return self._begin(connection, start, binary)
        except BaseException:
            connection.close()
            raise

    def _begin(self, connection: WireConnection, start: EndLsn, binary: bool) -> SlotStream:
        try:
            return self._streams.begin(connection, start, binary=binary)
        except SlotError as error:
            if error.retry is Retry.TIMED:
                raise
            raise SlotLostMeanwhile(
                f"the slot of the copy of {self._what} was lost",
                detail=error.message + (f": {error.detail}" if error.detail else ""),
                hint="Nothing is to be done: the table is copied again at once.",
            ) from error

    def _check(self, connection: WireConnection, start: EndLsn) -> None:
        server, history = self._source.server, server_history(connection)
        self.check_timeline(history.timeline)
        same = history.system_identifier == server.system_identifier
        if same and history.flushed < start and server.in_recovery:
            # One that was started again replays from further back, and comes to where it was by itself.
            raise standby_behind(self.name, start, history.flushed)
        if not same or history.flushed < start:
            raise SlotLostMeanwhile(
                f"the server that {self._what} was copied from is not there any more",
                detail=f"its system identifier was {server.system_identifier} and its position {start}, "
                f"now they are {history.system_identifier} and {history.flushed}",
                hint="Nothing is to be done: the table is copied again at once.",
            )

    def check_timeline(self, followed: int | None) -> None:
        """Raise if changes are followed on another timeline than the copy is of; None if that is not known yet."""
        if followed is not None and followed != self._timeline:
            raise TimelineChangedMeanwhile(
                f"the source changed its timeline during the copy of {self._what}",
                detail=f"the copy is of timeline {self._timeline}, changes are followed on {followed}",
                hint="Nothing is to be done: the table is copied again at once.",
            )

    def server_position(self) -> EndLsn:
        if self._admin is None:
            self._admin = connect(self._settings)
        return flush_lsn(self._admin)


def make_sync_slot(
    source: Source, guard: RunGuard, wake_up: WakeUp, name: str, what: str, admin: Connection, lock: TableLock
) -> SyncSlot:
    """Waits for every open transaction; says which, and is cancelled if one of them waits for our lock."""
    guard.require_lock()
    connection = WireConnection.connect(source.named(name), replication=True)
    made = threading.Event()
    watch = SlotWatch(source.server, guard.stop, what, admin, lock.backend_pid, name, connection)
    watcher = threading.Thread(target=watch.run, args=(made,), name=f"headwater-wait-{name}", daemon=True)
    try:
        with naming_limits(f"making replication slot {name}"):
            watcher.start()
    except HeadwaterError:
        connection.close()
        raise
    try:
        timeline = current_timeline(connection)
        command = f"CREATE_REPLICATION_SLOT {quote_identifier(name)} LOGICAL pgoutput"
        export = " (SNAPSHOT 'export')" if connection.server_version >= 150000 else " EXPORT_SNAPSHOT"
        row = connection.query(command + export, waits=True)[0]
    except HeadwaterError:
        connection.close()
        guard.raise_if_stopped()
        if watch.is_cancelled:
            raise CopyInterrupted(what, taken_tables(lock.connection, lock.table_ids)) from None
        raise
    finally:
        made.set()
        watcher.join()
    start, exported_snapshot = row["consistent_point"], row["snapshot_name"]
    assert start is not None
    assert exported_snapshot is not None
    return SyncSlot(source, guard, wake_up, what, name, connection, EndLsn.parse(start), exported_snapshot, timeline)
