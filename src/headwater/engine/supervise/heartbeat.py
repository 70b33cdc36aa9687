"""A sign of life in the WAL, at an interval that the user chose: for servers whose keepalives alone do not move a slot.

A transactional message, so that the stream carries a commit of our own: its end is a position to confirm, like that of any
transaction without a change for us. It makes no lake commit and no store write (invariant 9). Used by a thread of its own,
alone. It never stops a pipeline: what fails is logged and tried again at the next beat.
"""

from __future__ import annotations

import logging
import time

from headwater.errors import HeadwaterError
from headwater.source.session import Connection, connect, translating
from headwater.wire.settings import ConnectSettings

log = logging.getLogger(__name__)

PREFIX = "headwater"
_NOTICE_SECONDS = 15.0

# Decided by the server at that moment: a standby takes none, and may be promoted while we run.
_BEAT = "SELECT pg_logical_emit_message(true, %s, '') WHERE NOT pg_is_in_recovery()"


class Heartbeat:
    def __init__(self, pipeline_id: int, milliseconds: int | None, settings: ConnectSettings) -> None:
        self._interval_seconds = None if milliseconds is None else milliseconds / 1000
        self._name = f"headwater_heartbeat_{pipeline_id}"
        self._settings = settings
        self._connection: Connection | None = None
        self._next = time.monotonic()
        self._last_error = ""

    def beat_if_due(self) -> None:
        if self._interval_seconds is None or time.monotonic() < self._next:
            return
        try:
            with translating("sending a heartbeat"):
                self._open().execute(_BEAT, (PREFIX,))
            self._last_error = ""
        except HeadwaterError as error:
            self.close()
            if error.message != self._last_error:
                self._last_error = error.message
                log.warning("the heartbeat could not be sent, trying again: %s", error)
        self._next = time.monotonic() + self._interval_seconds

    def _open(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(
                self._settings,
                application_name=self._name,
                tcp_user_timeout_seconds=_NOTICE_SECONDS,
                longest_seconds=self._settings.answer_timeout_seconds,
                writes=True,
            )
            # Nothing depends on a beat: it must not wait for a synchronous standby that is unreachable.
            self._connection.execute("SET synchronous_commit = off")
        return self._connection

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
