"""The error tree: one base, three parts, and whether trying again can help.

Every error a person can meet is one of these. `message` names the object in one line, `detail` says what was found against
what was expected, `hint` says what to do next. None of the three ever carries a secret: callers pass host and user, never a
password or a connection string.
"""

from __future__ import annotations

from enum import StrEnum


class Retry(StrEnum):
    """Whether the same attempt may succeed later."""

    NEVER = "never"
    TIMED = "timed"
    MANUAL = "manual"


class HeadwaterError(Exception):
    """The base of every error Headwater raises on purpose."""

    default_retry = Retry.NEVER

    def __init__(self, message: str, *, detail: str = "", hint: str = "", retry: Retry | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint
        self.retry = retry if retry is not None else self.default_retry
        self.table_id: int | None = None
        """The table whose trouble it is, where it is one table's."""

    def __str__(self) -> str:
        lines = [self.message]
        if self.detail:
            lines.append(f"detail: {self.detail}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross the border between executor and driver; keyword arguments are lost by the default.
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(cls: type[HeadwaterError], attributes: dict[str, object]) -> HeadwaterError:
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
    """The server could not be reached."""

    default_retry = Retry.TIMED


class ConnectionLost(SourceError):
    """An established connection ended under us."""

    default_retry = Retry.TIMED


class AuthenticationError(SourceError):
    """The server did not accept who we are."""


class TlsError(SourceError):
    """TLS was refused, or the server's certificate is not trusted."""


class PrivilegeError(SourceError):
    """The role lacks a right it needs."""


class SourceSettingsError(SourceError):
    """A server setting (wal_level, max_replication_slots ...) rules the work out."""


class ServerError(SourceError):
    """An ErrorResponse of the server that has no class of its own."""

    def __init__(
        self, message: str, *, sqlstate: str = "", detail: str = "", hint: str = "", retry: Retry | None = None
    ) -> None:
        super().__init__(message, detail=detail, hint=hint, retry=retry)
        self.sqlstate = sqlstate


class SlotError(SourceError):
    """A replication slot is missing, lost, taken, or not ours."""


class ProtocolError(HeadwaterError):
    """Bytes that are not what the protocol promises. `offset` is where, from the start of the bytes given."""

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
    """The disk that a large transaction goes to has no room or cannot be written: the world's trouble, never a table's."""

    default_retry = Retry.TIMED


class SchemaError(HeadwaterError):
    """A table's columns, types or identity cannot be replicated as they are."""


class ValueOutOfRange(HeadwaterError):
    """A value has no exact counterpart in the lake's type, and no policy for it was chosen."""

    default_retry = Retry.MANUAL


class StateError(HeadwaterError):
    """A transition that the table of states does not know."""


class StoreError(HeadwaterError):
    """The store refused or holds something it should not."""


class StoreUnavailable(StoreError):
    """The store is out of reach: the world's trouble, never a table's."""

    default_retry = Retry.TIMED


class DestinationError(HeadwaterError):
    """The destination refused what it was given."""

    default_retry = Retry.TIMED


class DestinationUnavailable(DestinationError):
    """The destination is out of reach: the world's trouble, never a table's."""


class LakeCommitUnknown(DestinationError):
    """A lake commit whose outcome could not be learnt; the watermark decides."""


class WatermarkError(DestinationError):
    """The lake shows less than the store recorded, or another epoch: never a silent gap."""

    default_retry = Retry.NEVER


class ChangeRefused(DestinationError):
    """A change that cannot be applied to its table as it is. Always that table's own; a new copy of it is exact again."""


class LakeTableError(DestinationError):
    """Writes to one lake table fail while the lake and its other tables work. Always that table's own."""


class LakeTableTaken(DestinationError):
    """A lake table belongs to another source table, pipeline, database or cluster; nothing was written."""


class SparkLost(HeadwaterError):
    """The JVM that runs Spark is gone; commits under way are unknown."""


class PipelineLocked(HeadwaterError):
    """Another run of this pipeline holds its lock, or ours was lost."""


class ShutdownRequested(HeadwaterError):
    """Work was interrupted by an orderly stop. Never persisted as a table's error."""
