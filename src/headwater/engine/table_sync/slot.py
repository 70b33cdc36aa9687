"""A table sync worker's slot: made under the tables' lock, with the exported snapshot that all its copies are read at."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass

from headwater.engine.follow.slot_watch import SlotWatch
from headwater.engine.run import Run
from headwater.errors import HeadwaterError, StartAgain
from headwater.limits import naming_limits
from headwater.lsn import EndLsn
from headwater.schema.table import TableId, quote_identifier
from headwater.source.session import Connection
from headwater.source.table_lock import TableLock, taken_tables
from headwater.source.timeline import current_timeline
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings


class GaveWay(StartAgain):
    """A statement on the source wants a table for itself and we were in each other's way: it goes first."""

    def __init__(self, what: str, suspects: Collection[TableId]) -> None:
        super().__init__(
            f"a statement that wants a table for itself came in the way of the copy of {what}",
            detail="it waited for our lock, and we for it",
            hint="Nothing is to be done: the statement goes first, and the copy starts again after it.",
        )
        self.suspects = frozenset(suspects)
        """The tables that are wanted, as far as that could be seen."""


@dataclass(frozen=True, slots=True)
class SyncSlot:
    connection: WireConnection
    name: str
    start: EndLsn
    exported_snapshot: str
    timeline: int
    """Of the server that the slot is on, which may be another one than the apply worker's once a standby was promoted."""


def make_sync_slot(
    run: Run, settings: ConnectSettings, name: str, what: str, admin: Connection, lock: TableLock
) -> SyncSlot:
    """Waits for every open transaction; says for whom, and gives way to one that waits for our lock."""
    run.require_lock()
    connection = WireConnection.connect(settings, replication=True)
    made = threading.Event()
    watch = SlotWatch(run, what, admin, lock.backend_pid, name, connection)
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
        run.raise_if_stopped()
        if watch.gave_way:
            raise GaveWay(what, taken_tables(lock.connection, lock.table_ids)) from None
        raise
    finally:
        made.set()
        watcher.join()
    start, snapshot = row["consistent_point"], row["snapshot_name"]
    assert start is not None
    assert snapshot is not None
    return SyncSlot(connection, name, EndLsn.parse(start), snapshot, timeline)
