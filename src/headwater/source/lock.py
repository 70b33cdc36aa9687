"""One run of a pipeline at a time: a session advisory lock on the pipeline's id, held for the whole run (invariant 6).

The lock is held by a session of its own in the source database. Both ends notice soon when the other is gone: the
server by TCP keepalives that the session asks it for, we by `check()`, which the engine calls now and then and which waits for
seconds only. Losing the lock stops the pipeline.

A session that answers no more may still exist on the server and hold the lock: behind a proxy that forwards nothing, neither end
sees the other end. Before the lock is taken again, that session is ended; it is our own, identified by its pid and start.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

import psycopg

from headwater.errors import ConnectionLost, PipelineLocked
from headwater.lsn import EndLsn
from headwater.source.patient import PatientConnection, WaitEnded
from headwater.source.session import Connection, connect, translated, translating
from headwater.wire.settings import ConnectSettings, TcpKeepaliveConfig

# "hdwt" as a number: the first half of the key, so that advisory locks of other programs do not collide with ours.
LOCK_CLASS = 0x68647774
_NOTICE_SECONDS = 15.0
_ANSWER_SECONDS = 10.0
"""For one round trip, unless the connection's answer timeout is shorter."""
_KEEPALIVE = TcpKeepaliveConfig(idle_seconds=5, interval_seconds=5, retries=2)
_SERVER_KEEPALIVE = {"tcp_keepalives_idle": "5", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "2"}

_POSITION = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END::text"
_END_OWN = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid = %s AND backend_start::text = %s"
_IS_OWN = "SELECT true FROM pg_stat_activity WHERE pid = %s AND backend_start::text = %s"

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
    """Whether any session holds the pipeline's lock at this moment: a run of it, or a command such as remove."""
    with translating(f"looking for the lock of pipeline {pipeline_id}"):
        row = connection.execute(_HOLDER, (LOCK_CLASS, lock_key(pipeline_id) & 0xFFFFFFFF)).fetchone()
    return row is not None


class PipelineLock:
    """May be used from several threads. `acquire()` before anything else of a run, `release()` after everything."""

    def __init__(self, settings: ConnectSettings, pipeline_id: int) -> None:
        self._settings = replace(settings, keepalive=_KEEPALIVE)
        self._pipeline_id = pipeline_id
        self._guard = threading.Lock()
        self._connection: PatientConnection | None = None
        self._session: tuple[int, str] | None = None
        """The number and the start of the session that has the lock, or had it last."""

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
                longest_seconds=wait_seconds + self._answer_seconds,
            )
            try:
                self._end_own(connection)
                self._take(connection, wait_seconds)
            except BaseException:
                connection.close()
                raise
            connection.longest_seconds = self._answer_seconds
            self._connection = connection

    @property
    def _answer_seconds(self) -> float:
        return min(_ANSWER_SECONDS, self._settings.answer_timeout_seconds)

    def _end_own(self, connection: Connection) -> None:
        if self._session is not None:
            # Without the right to end it, the server's keepalives do.
            with translating("ending the session that held the lock"), suppress(psycopg.errors.InsufficientPrivilege):
                connection.execute(_END_OWN, self._session)

    def _take(self, connection: Connection, wait_seconds: float) -> None:
        wanted = {**_SERVER_KEEPALIVE, "lock_timeout": str(max(1, round(wait_seconds * 1000)))}
        try:
            connection.execute(
                "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS wanted(name, value)",
                (list(wanted), list(wanted.values())),
            )
            connection.execute("SELECT pg_advisory_lock(%s::int, %s::int)", (LOCK_CLASS, lock_key(self._pipeline_id)))
            connection.execute("SET lock_timeout = 0")
            self._session = connection.execute(
                "SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()"
            ).fetchone()
        except psycopg.errors.LockNotAvailable:
            raise self._held_by_another(connection) from None
        except psycopg.Error as error:
            raise translated(error, f"taking the lock of pipeline {self._pipeline_id}") from error

    def _held_by_another(self, connection: Connection) -> PipelineLocked | ConnectionLost:
        with suppress(psycopg.Error):
            row = connection.execute(_HOLDER, (LOCK_CLASS, lock_key(self._pipeline_id) & 0xFFFFFFFF)).fetchone()
            if row is not None:
                if self._session is not None and connection.execute(_IS_OWN, self._session).fetchone() is not None:
                    return self._held_by_own(row[0])
                pid, application, user, address, since = row
                seen = {"application": application, "user": user, "address": address, "since": since}
                known = ", ".join(f"{name} {value}" for name, value in seen.items() if value)
                return self._locked(f"process {pid} of the server holds its advisory lock ({known})")
        return self._locked("another session holds its advisory lock")

    def _held_by_own(self, pid: int) -> ConnectionLost:
        return ConnectionLost(
            f"the lock of pipeline {self._pipeline_id} is still held by an earlier session of this run that answers no more",
            detail=f"pg_terminate_backend was called for process {pid} of the server, which has not ended",
            hint=f"This is retried. If it continues, process {pid} hangs: end it on the server's host.",
        )

    def _locked(self, detail: str) -> PipelineLocked:
        return PipelineLocked(
            f"pipeline {self._pipeline_id} is already running",
            detail=detail,
            hint="Stop the other run first, or give this pipeline an id and a warehouse of its own.",
        )

    @property
    def held(self) -> bool:
        """What this side knows; only `check()` asks the server."""
        with self._guard:
            return self._connection is not None and not self._connection.closed

    def check(self) -> EndLsn | None:
        """Raise PipelineLocked unless the session, and so the lock, is alive. Takes one round trip.

        Returns how far the server's log is flushed, or replayed on a standby; None if it does not say.
        """
        with self._guard:
            connection = self._connection
            if connection is None:
                raise self._lost("it was never acquired, or was released")
            try:
                row = connection.execute(f"SELECT {_POSITION}").fetchone()
            except psycopg.Error as error:
                connection.close()
                said = error.diag.message_primary or (str(error) if isinstance(error, WaitEnded) else "")
                raise self._lost(f"its session ended: {said or type(error).__name__}") from error
        return EndLsn.parse(row[0]) if row is not None and row[0] is not None else None

    def _lost(self, why: str) -> PipelineLocked:
        return PipelineLocked(
            f"the lock of pipeline {self._pipeline_id} was lost",
            detail=f"{why}; another run may have started",
            hint="Start the pipeline again; it continues from its recorded progress.",
        )

    def release(self) -> None:
        """Release the lock. May be called twice, and after the session has ended."""
        with self._guard:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
