"""The error tree: one base, three parts, and whether a retry can help.

Every error that a user can see is one of these. `message` names the object in one line, `detail` says what was found against
what was expected, `hint` says what to do next. None of the three ever carries a secret: callers pass host and user, never a
password or a connection string.

An error is a value: nothing of it changes after it was made, since several threads may hold it. What each one means to
a pipeline is defined here too, in one place: `meaning`.
"""

from __future__ import annotations

import traceback
from enum import StrEnum
from typing import Any, Self, TypeVar

E = TypeVar("E", bound="HeadwaterError")


class Retry(StrEnum):
    """Whether the same attempt may succeed later."""

    NEVER = "never"
    TIMED = "timed"
    MANUAL = "manual"


class HeadwaterError(Exception):
    """The base of every error Headwater raises on purpose."""

    default_retry = Retry.NEVER

    message: str
    detail: str
    hint: str
    retry: Retry
    table_id: int | None
    """The table that failed, if the error is that of one table."""

    def __init__(
        self,
        message: str,
        *,
        detail: str = "",
        hint: str = "",
        retry: Retry | None = None,
        table_id: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint
        self.retry = retry if retry is not None else self.default_retry
        self.table_id = table_id

    def __setattr__(self, name: str, value: object) -> None:
        # Set once, in __init__. Names with underscores are Python's own: traceback, cause, notes.
        if name in self.__dict__ and not name.startswith("__"):
            raise AttributeError(f"{name} of an error does not change; make another with with_retry or for_table")
        super().__setattr__(name, value)

    def with_retry(self, retry: Retry) -> Self:
        """The same error with another policy."""
        return self._with(retry=retry)

    def for_table(self, table_id: int, name: str = "") -> Self:
        """The same error as that of one table; with a name, the message begins with it."""
        return self._with(table_id=table_id, message=f"table {name}: {self.message}" if name else self.message)

    def _with(self, **changes: Any) -> Self:
        made = _rebuild(type(self), {**self.__dict__, **changes})
        made.__cause__, made.__context__ = self.__cause__, self.__context__
        made.__suppress_context__ = self.__suppress_context__
        return made.with_traceback(self.__traceback__)

    @property
    def summary(self) -> str:
        """Message and detail in one line: what a display or a log line shows where there is no room for more."""
        return f"{self.message}: {self.detail}" if self.detail else self.message

    def __str__(self) -> str:
        lines = [self.message]
        if self.detail:
            lines.append(f"detail: {self.detail}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments are lost by the default.
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(cls: type[E], attributes: dict[str, Any]) -> E:
    error = cls.__new__(cls, attributes["message"])
    error.__dict__.update(attributes)
    return error


class ConfigError(HeadwaterError):
    """Settings that cannot work; carries every mistake at once in its detail."""


class PreflightError(HeadwaterError):
    """The source, store or destination is not ready for this pipeline; all findings at once."""


class SourceError(HeadwaterError):
    """Postgres refused or failed."""


class ConnectError(SourceError):
    """The server is unreachable, or refused the connection."""

    default_retry = Retry.TIMED


class ConnectionLost(SourceError):
    """An established connection was lost."""

    default_retry = Retry.TIMED


class LimitReached(ConnectError):
    """A limit of this process or this machine was reached: no more files, threads or memory for now.

    Handled like a server that is unreachable: the pipeline waits and retries, and no table is marked failed.
    """


class AuthenticationError(SourceError):
    """The server did not accept the role, its password or its certificate."""


class TlsError(SourceError):
    """TLS was refused, or the server's certificate is not trusted."""


class PrivilegeError(SourceError):
    """The role lacks a right it needs."""


class SourceSettingsError(SourceError):
    """A server setting (wal_level, max_replication_slots ...) makes the work impossible."""


class ServerError(SourceError):
    """An ErrorResponse of the server that has no class of its own."""

    def __init__(
        self, message: str, *, sqlstate: str = "", detail: str = "", hint: str = "", retry: Retry | None = None
    ) -> None:
        super().__init__(message, detail=detail, hint=hint, retry=retry)
        self.sqlstate = sqlstate


class PublicationMissing(ServerError):
    """Up to version 17 the server cannot send a change that was made while the publication did not exist."""


class SlotError(SourceError):
    """A replication slot is missing, invalidated, in use, or not ours."""


class ProtocolError(HeadwaterError):
    """Bytes that do not follow the protocol. `offset` says where, from the start of the bytes given."""

    def __init__(
        self, message: str, *, offset: int = 0, detail: str = "", hint: str = "", retry: Retry | None = None
    ) -> None:
        super().__init__(
            message,
            detail=detail or f"at byte {offset}",
            hint=hint
            or "Report this with the server's version; the bytes are not valid for the protocol we asked for.",
            retry=retry,
        )
        self.offset = offset


class SpoolError(HeadwaterError):
    """The disk that a large transaction goes to has no room or cannot be written."""

    default_retry = Retry.TIMED


class SchemaError(HeadwaterError):
    """A table's columns, types or replica identity cannot be replicated as they are."""


class ValueOutOfRange(HeadwaterError):
    """A value has no exact counterpart in the column's type in the lake, and no policy for it was chosen."""

    default_retry = Retry.MANUAL


class StateError(HeadwaterError):
    """A transition that is not in the table of states."""


class StoreError(HeadwaterError):
    """The store refused a statement, or holds something that it should not."""


class StoreUnavailable(StoreError):
    """The store is unreachable."""

    default_retry = Retry.TIMED


class DestinationError(HeadwaterError):
    """The destination refused what it was given."""

    default_retry = Retry.TIMED


class DestinationUnavailable(DestinationError):
    """The destination is unreachable, read-only or full."""


class LakeCommitUnknown(DestinationError):
    """A lake commit whose outcome is unknown; the watermark in the table shows whether it was done."""


class WatermarkError(DestinationError):
    """The lake shows less than the store recorded, or another epoch: never a silent gap."""

    default_retry = Retry.NEVER


class ChangeRefused(DestinationError):
    """A change that cannot be applied to its table as it is. Always that table's own error; a new copy makes it exact again."""


class LakeTableError(DestinationError):
    """Writes to one lake table fail while the lake and its other tables work. Always that table's own error."""


class LakeTableTaken(DestinationError):
    """A lake table belongs to another source table, pipeline, database or cluster; nothing was written."""


class StartAgain(HeadwaterError):
    """Not recorded as an error of the table: it goes back to Init, and its copy starts again soon."""

    default_retry = Retry.TIMED


class SparkLost(HeadwaterError):
    """The JVM that runs Spark has ended; the outcome of commits under way is unknown."""


class PipelineLocked(HeadwaterError):
    """Another run of this pipeline holds its lock, ours was lost, or another run has taken over."""


class ShutdownRequested(HeadwaterError):
    """Work was interrupted by an orderly stop. Never persisted as a table's error."""


class Meaning(StrEnum):
    """What an error means to a pipeline."""

    WAIT = "wait"
    """Infrastructure is unreachable: wait and retry for as long as it takes; no table is marked failed (invariant 15)."""
    START_AGAIN = "start again"
    """The copy starts again; no error is recorded."""
    TABLE = "table"
    """The error of the table whose work raised it, by its `retry`; where no single table is concerned, of the run."""
    FATAL = "fatal"
    """The run ends."""
    STOPPING = "stopping"
    """The run was asked to end; nothing went wrong."""


_MEANINGS: dict[type[HeadwaterError], Meaning] = {
    HeadwaterError: Meaning.TABLE,
    ConnectError: Meaning.WAIT,
    ConnectionLost: Meaning.WAIT,
    StoreUnavailable: Meaning.WAIT,
    DestinationUnavailable: Meaning.WAIT,
    LakeCommitUnknown: Meaning.WAIT,
    SpoolError: Meaning.WAIT,
    StartAgain: Meaning.START_AGAIN,
    PublicationMissing: Meaning.START_AGAIN,
    SparkLost: Meaning.FATAL,
    PipelineLocked: Meaning.FATAL,
    ShutdownRequested: Meaning.STOPPING,
}


def meaning(error: HeadwaterError) -> Meaning:
    """By the nearest of its classes that has one."""
    return next(_MEANINGS[cls] for cls in type(error).__mro__ if cls in _MEANINGS)


def passes(error: HeadwaterError) -> bool:
    """Whether the same attempt, made again later, may succeed."""
    return meaning(error) is Meaning.WAIT or error.retry is Retry.TIMED


def error_to_json(error: HeadwaterError) -> dict[str, Any]:
    """All of an error but its cause and traceback. A class of another module becomes its nearest base class of this one."""
    names = (cls.__name__ for cls in type(error).__mro__ if globals().get(cls.__name__) is cls)
    return {**error.__dict__, "class": next(names)}


def error_from_json(value: dict[str, Any]) -> HeadwaterError:
    """KeyError or ValueError for what `error_to_json` did not make."""
    attributes = dict(value)
    cls = globals()[attributes.pop("class")]
    if not (isinstance(cls, type) and issubclass(cls, HeadwaterError)):
        raise ValueError(f"{cls} is no error of ours")
    return _rebuild(cls, {**attributes, "retry": Retry(attributes["retry"])})


class _Values:
    """For the whole process: errors are made in every room, and none of them knows a setting."""

    shown = False


def show_values(shown: bool) -> None:
    """Whether messages of Postgres, Spark and Arrow may be shown with the values of rows that they quote. Off, unless a setting
    turns it on."""
    _Values.shown = shown


def values_are_shown() -> bool:
    return _Values.shown


def said_by(error: BaseException) -> str:
    """The message of an error that is not ours, without values of rows (invariant 16).

    Python's and Arrow's own errors about values quote them; of those only the class is shown.
    """
    if not values_are_shown() and isinstance(error, (ValueError, TypeError, ArithmeticError, LookupError)):
        return f"{type(error).__name__}; its message is not shown, since it may hold values of rows"
    return f"{type(error).__name__}: {error}"


class Lines(str):
    """A text whose newlines are our own, and are kept as line breaks where it is shown."""

    __slots__ = ()


def where_raised(error: BaseException) -> Lines:
    """The lines of code that an error came through, for the log: a traceback would show its message, too."""
    return Lines("".join(traceback.format_tb(error.__traceback__)).rstrip())
