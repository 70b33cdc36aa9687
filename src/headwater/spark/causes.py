"""The chain of causes of a Java exception, as classes and codes and not as text.

The text of the outer exception is long and says little; the root cause says why. Whether the lake is unreachable is decided by
the classes of the causes, the SQLSTATE of an SQL exception and SQLite's result code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MOST_CAUSES = 20
_MOST_CLASSES = 12
_MOST_TEXT = 300


@dataclass(frozen=True, slots=True)
class JavaCause:
    """One exception of the chain."""

    kinds: tuple[str, ...]
    """Its class, then the classes it derives from."""
    message: str
    sqlstate: str = ""
    code: int = 0
    """The vendor's, of an SQL exception."""

    def __str__(self) -> str:
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        name = self.kinds[0].rpartition(".")[2]
        return f"{name}: {lines[0][:_MOST_TEXT]}" if lines else name


def java_causes(error: BaseException) -> list[JavaCause]:
    """From the exception that reached Python to the one that began it. None if it is no Java exception."""
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    causes: list[JavaCause] = []
    while java is not None and len(causes) < _MOST_CAUSES:
        causes.append(_cause(java))
        java = java.getCause()
    return causes


def _cause(java: Any) -> JavaCause:
    kinds: list[str] = []
    cls = java.getClass()
    while cls is not None and len(kinds) < _MOST_CLASSES:
        kinds.append(str(cls.getName()))
        cls = cls.getSuperclass()
    message = str(java.getMessage() or "")
    if _SQL not in kinds:
        return JavaCause(tuple(kinds), message)
    return JavaCause(tuple(kinds), message, str(java.getSQLState() or ""), int(java.getErrorCode()))


def root_cause(causes: Sequence[JavaCause]) -> str:
    """The root cause, and what was being done then, if an outer exception says that in other words."""
    *before, root = causes
    told = next((cause for cause in reversed(before) if cause.message and root.message not in cause.message), None)
    return str(root) if told is None else f"{root} ({told})"


_SQL = "java.sql.SQLException"
_EOF = "java.io.EOFException"
"""A Python worker that ended: waiting does not help."""
_UNREACHABLE = frozenset(
    {
        # Network, disk, permissions, files and directories that are not there. Whether that is one table's file or the
        # whole warehouse is for the destination to find out.
        "java.io.IOException",
        "java.io.UncheckedIOException",
        "java.nio.file.ReadOnlyFileSystemException",
        "java.nio.file.FileSystemNotFoundException",
        "java.util.concurrent.TimeoutException",
        "java.sql.SQLTransientException",
        "java.sql.SQLRecoverableException",
        "java.sql.SQLNonTransientConnectionException",
        "org.apache.iceberg.exceptions.NotFoundException",
        "org.apache.iceberg.exceptions.RuntimeIOException",
        "org.apache.iceberg.exceptions.ServiceFailureException",
        "org.apache.iceberg.exceptions.ServiceUnavailableException",
        "org.apache.iceberg.exceptions.NotAuthorizedException",
        "org.apache.iceberg.exceptions.ForbiddenException",
        "org.apache.iceberg.jdbc.UncheckedInterruptedException",
        "software.amazon.awssdk.core.exception.SdkClientException",
        "software.amazon.awssdk.services.s3.model.S3Exception",
        "com.google.cloud.storage.StorageException",
        "com.azure.core.exception.AzureException",
    }
)
# Connection, resources, operator's intervention, the system under it; a transaction that a server in recovery refuses.
_UNREACHABLE_STATES = ("08", "53", "57", "58", "25006")
# PERM, BUSY, LOCKED, READONLY, IOERR, FULL, CANTOPEN, PROTOCOL, NOTADB
_UNREACHABLE_SQLITE = frozenset({3, 5, 6, 8, 10, 13, 14, 15, 26})
_SQLITE = "org.sqlite.SQLiteException"
_NO_DRIVER = "No suitable driver"
"""Java reports it as a lost connection; a jar is missing."""
_NO_CATALOG = "no such table: iceberg_"
"""SQLite makes an empty file where there is none: the catalog's file was moved away."""


def is_unreachable(causes: Sequence[JavaCause]) -> bool:
    """Whether the lake, its catalog or its storage is unreachable or cannot be written, rather than that it refused."""
    return any(_is_unreachable(cause) for cause in causes)


def _is_unreachable(cause: JavaCause) -> bool:
    if _EOF in cause.kinds:
        return False
    if _SQLITE in cause.kinds:
        return (cause.code & 0xFF) in _UNREACHABLE_SQLITE or _NO_CATALOG in cause.message
    if cause.sqlstate.startswith(_UNREACHABLE_STATES):
        return _NO_DRIVER not in cause.message
    return not _UNREACHABLE.isdisjoint(cause.kinds)
