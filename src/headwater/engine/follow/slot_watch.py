"""Beside the creation of a slot, which waits for every open transaction: says which, and cancels it before a deadlock."""

from __future__ import annotations

import logging
import threading
import time

from headwater.engine.stop import Stop
from headwater.errors import HeadwaterError
from headwater.source.server import ServerFacts
from headwater.source.session import Connection
from headwater.source.slot_check import blockers
from headwater.source.table_lock import waits_for_each_other
from headwater.wire.connection import WireConnection

log = logging.getLogger(__name__)

NO_LOCK = -1
_LOOK_SECONDS = 0.5
_SAY_AFTER_SECONDS = 5.0


class SlotWatch:
    """Runs in a thread of its own while the slot is created; cancels that on a stop, or where the session that it waits for waits
    for our table lock.

    `lock_pid` is the session that holds our table lock, or NO_LOCK.
    """

    def __init__(
        self,
        server: ServerFacts,
        stop: Stop,
        what: str,
        admin: Connection,
        lock_pid: int,
        application_name: str,
        making: WireConnection,
    ) -> None:
        self._server = server
        self._stop = stop
        self._what = what
        self._admin = admin
        self._lock_pid = lock_pid
        self._application_name = application_name
        self._making = making
        self.is_cancelled = False

    def run(self, made: threading.Event) -> None:
        said, sees = time.monotonic(), True
        while not made.wait(_LOOK_SECONDS):
            if self._stop.is_set():
                self._cancel()
                return
            if not sees:
                continue  # a stop is still to be noticed
            try:
                if waits_for_each_other(self._admin, self._application_name, self._lock_pid):
                    self.is_cancelled = True
                    self._cancel()
                    return
                if time.monotonic() - said >= _SAY_AFTER_SECONDS:
                    said = time.monotonic()
                    self._say()
            except HeadwaterError as error:
                sees = False
                log.info(
                    "%s: cannot read what blocks the creation of its replication slot: %s",
                    self._what,
                    error.message,
                )

    def _cancel(self) -> None:
        """A server that does not take it is left by the session itself, soon."""
        try:
            self._making.cancel()
        except HeadwaterError as error:
            log.info("%s: the creation of its replication slot could not be cancelled: %s", self._what, error.message)

    def _say(self) -> None:
        if self._server.in_recovery:
            # A standby sees the primary's transactions only in what the primary logs of them, every 15 s while it is busy.
            log.warning(
                "%s: creating its replication slot waits until the primary logs its running transactions and those have ended; "
                "hint: run SELECT pg_log_standby_snapshot() on the primary",
                self._what,
            )
            return
        names = "; ".join(str(blocker) for blocker in blockers(self._admin)) or "transactions that have just begun"
        log.warning("%s: creating its replication slot is blocked by %s", self._what, names)
