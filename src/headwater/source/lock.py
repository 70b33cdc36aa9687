"""One run of a pipeline at a time: a session advisory lock on the pipeline's id, held for the whole run (invariant 6).

The lock lives in a session of its own in the source database. Both ends notice quickly when the other is gone: the
server by keepalives that the session asks it for, we by `check()`, which the engine calls now and then. Losing the lock
stops the pipeline.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

import psycopg

from headwater.errors import PipelineLocked
from headwater.source.session import Connection, connect, translated, translating
from headwater.wire.settings import ConnectSettings, KeepaliveSettings

# "hdwt" as a number: the first half of the key, so that other users of advisory locks are not in the way.
LOCK_CLASS = 0x68647774
_NOTICE_SECONDS = 15.0
_KEEPALIVE = KeepaliveSettings(idle_seconds=5, interval_seconds=5, retries=2)
_SERVER_KEEPALIVE = {"tcp_keepalives_idle": "5", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "2"}

_HOLDER = """
SELECT l.pid, a.application_name, a.usename::text, a.client_addr::text, a.backend_start::timestamptz(0)::text
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = %s::bigint::oid AND l.objid = %s::bigint::oid
"""


def lock_key(pipeline_id: int) -> int:
    """The second half of the key is a signed 32 bit number for the server."""
    low = pipeline_id & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


def is_locked(connection: Connection, pipeline_id: int) -> bool:
    """Whether somebody runs the pipeline, or holds its lock for another reason, at this moment."""
    with translating(f"looking for the lock of pipeline {pipeline_id}"):
        row = connection.execute(_HOLDER, (LOCK_CLASS, lock_key(pipeline_id) & 0xFFFFFFFF)).fetchone()
    return row is not None


class PipelineLock:
    """May be used from several threads. `acquire()` before anything else of a run, `release()` after everything."""

    def __init__(self, settings: ConnectSettings, pipeline_id: int) -> None:
        self._settings = replace(settings, keepalive=_KEEPALIVE)
        self._pipeline_id = pipeline_id
        self._guard = threading.Lock()
        self._connection: Connection | None = None

    def acquire(self, wait_seconds: float = 5.0) -> None:
        """Take the lock or raise PipelineLocked with its holder.

        Waits a little: a run that was killed a moment ago holds the lock until the server has seen its socket close.
        """
        with self._guard:
            if self._connection is not None:
                raise PipelineLocked(
                    f"pipeline {self._pipeline_id} is already running in this process",
                    detail="its lock was acquired before and not released",
                    hint="Shut the running pipeline down before starting it again.",
                )
            connection = connect(
                self._settings,
                application_name=f"headwater_lock_{self._pipeline_id}",
                tcp_user_timeout_seconds=_NOTICE_SECONDS,
            )
            try:
                self._take(connection, wait_seconds)
            except BaseException:
                connection.close()
                raise
            self._connection = connection

    def _take(self, connection: Connection, wait_seconds: float) -> None:
        wanted = {**_SERVER_KEEPALIVE, "lock_timeout": str(max(1, round(wait_seconds * 1000)))}
        try:
            connection.execute(
                "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS wanted(name, value)",
                (list(wanted), list(wanted.values())),
            )
            connection.execute("SELECT pg_advisory_lock(%s::int, %s::int)", (LOCK_CLASS, lock_key(self._pipeline_id)))
            connection.execute("SET lock_timeout = 0")
        except psycopg.errors.LockNotAvailable:
            raise self._held_by_another(connection) from None
        except psycopg.Error as error:
            raise translated(error, f"taking the lock of pipeline {self._pipeline_id}") from error

    def _held_by_another(self, connection: Connection) -> PipelineLocked:
        with suppress(psycopg.Error):
            row = connection.execute(_HOLDER, (LOCK_CLASS, lock_key(self._pipeline_id) & 0xFFFFFFFF)).fetchone()
            if row is not None:
                pid, application, user, address, since = row
                seen = {"application": application, "user": user, "address": address, "since": since}
                known = ", ".join(f"{name} {value}" for name, value in seen.items() if value)
                return self._locked(f"process {pid} of the server holds its lock ({known})")
        return self._locked("another session holds its lock")

    def _locked(self, detail: str) -> PipelineLocked:
        return PipelineLocked(
            f"pipeline {self._pipeline_id} is already running",
            detail=detail,
            hint="Stop the other run first, or give this pipeline an id and a warehouse of its own.",
        )

    @property
    def held(self) -> bool:
        """What we believe; only `check()` asks the server."""
        with self._guard:
            return self._connection is not None and not self._connection.closed

    def check(self) -> None:
        """Raise PipelineLocked unless the session, and so the lock, is alive. Takes one round trip."""
        with self._guard:
            connection = self._connection
            if connection is None:
                raise self._lost("it was never acquired, or was released")
            try:
                connection.execute("SELECT 1")
            except psycopg.Error as error:
                connection.close()
                raise self._lost(f"its session ended: {error.diag.message_primary or type(error).__name__}") from error

    def _lost(self, why: str) -> PipelineLocked:
        return PipelineLocked(
            f"the lock of pipeline {self._pipeline_id} was lost",
            detail=f"{why}; another run may have started",
            hint="Start the pipeline again; it goes on from its recorded progress.",
        )

    def release(self) -> None:
        """Give the lock back. May be called twice, and after the session has died."""
        with self._guard:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
