"""The store's one session: opened when needed, opened again when lost, used by one thread at a time.

Every statement it is given may be sent twice (see queries.sql), so after a lost session the statement is tried once more and
then raises StoreUnavailable: the pipeline waits and retries, and no table is marked failed (invariant 15).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg

from headwater.errors import (
    ConnectError,
    ConnectionLost,
    HeadwaterError,
    LimitReached,
    SourceError,
    StoreError,
    StoreUnavailable,
)
from headwater.source.session import Connection, connect, lost
from headwater.store.queries import queries
from headwater.store.refusal import refusal_hint
from headwater.wire.server_errors import without_values
from headwater.wire.settings import ConnectSettings

_T = TypeVar("_T")
_NOTICE_SECONDS = 30.0

# The statement was refused, and may be taken later or by the server that is primary then.
_PASSING = ("25006", "40", "53", "55P03", "57", "58")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a query gave."""

    rows: list[tuple[Any, ...]]
    """None for a statement without any."""
    touched: int

    @property
    def wrote(self) -> bool:
        """Whether a statement that writes has written, for certain: it says so by its count, or by a number in its answer."""
        return self.touched > 0 and (not self.rows or bool(self.rows[0][0]))


class StoreConnection:
    """A context manager that holds the session for one piece of work; `with` may be nested in one thread."""

    def __init__(self, settings: ConnectSettings, application_name: str) -> None:
        self._settings = settings
        self._application_name = application_name
        self._lock = threading.RLock()
        self._connection: Connection | None = None

    def is_to(self, settings: ConnectSettings) -> bool:
        """Whether it leads to the same database of the same servers, as far as the settings tell."""
        own = self._settings
        return (own.host, own.port, own.database) == (settings.host, settings.port, settings.database)

    def interrupt_with(self, stop: threading.Event) -> None:
        """Once it is set, sessions opened from now on are given up soon when they do not answer."""
        with self._lock:
            self._settings = replace(self._settings, interrupt=stop)

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def run(self, name: str, parameters: Mapping[str, Any]) -> Answer:
        """One named query."""

        def send(connection: Connection) -> Answer:
            cursor = connection.execute(queries()[name], parameters)
            return Answer(cursor.fetchall() if cursor.description is not None else [], cursor.rowcount)

        return self.use(send)

    def use(self, work: Callable[[Connection], _T]) -> _T:
        """Run a statement that may be run twice, on a session that is open."""
        with self._lock:
            try:
                return self._attempt(work)
            except _SessionLost:
                pass
            try:
                return self._attempt(work)
            except _SessionLost as again:
                raise self._unavailable(again.why) from again

    def _attempt(self, work: Callable[[Connection], _T]) -> _T:
        connection = self._open()
        try:
            return work(connection)
        except psycopg.Error as error:
            why = error.diag.message_primary or " ".join(str(error).split()) or type(error).__name__
            why, _ = without_values(error.sqlstate or "", why, "")
            if lost(error) or connection.closed:
                self.close()
                raise _SessionLost(why) from error
            state = error.sqlstate or ""
            if state.startswith(_PASSING):
                raise self._unavailable(f"{why} (SQLSTATE {state})") from error
            raise StoreError(
                f"the store at {self._settings.address} refused a statement",
                detail=f"{why} (SQLSTATE {state})",
                hint=error.diag.message_hint or refusal_hint(state, connection),
            ) from error

    def _open(self) -> Connection:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        try:
            self._connection = connect(
                self._settings,
                application_name=self._application_name,
                tcp_user_timeout_seconds=_NOTICE_SECONDS,
                # All that is recorded is small: an answer that takes longer does not come.
                longest_seconds=self._settings.answer_timeout_seconds,
                writes=True,
            )
            # What is recorded has to be durable before it is confirmed to Postgres (invariant 2).
            self._connection.execute(
                "SELECT set_config(name, 'on', false) FROM pg_settings "
                "WHERE name = 'synchronous_commit' AND setting = 'off'"
            )
        except LimitReached as error:
            raise self._unavailable(error.summary, error.hint) from error
        except (ConnectError, ConnectionLost) as error:
            raise self._unavailable(error.detail) from error
        except SourceError as error:
            raise _as_store_error(error) from error
        except psycopg.Error as error:
            self.close()
            raise _SessionLost(type(error).__name__) from error
        return self._connection

    def _unavailable(self, why: str, hint: str = "") -> StoreUnavailable:
        return StoreUnavailable(
            f"the store at {self._settings.address} is unreachable",
            detail=why,
            hint=hint
            or "Check that the server runs. Headwater retries; meanwhile nothing is lost and nothing is confirmed to Postgres.",
        )

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()


class _SessionLost(Exception):
    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def _as_store_error(error: HeadwaterError) -> StoreError:
    return StoreError(f"the store cannot be opened: {error.message}", detail=error.detail, hint=error.hint)
