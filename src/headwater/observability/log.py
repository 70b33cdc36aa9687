"""Logging: one plain line for each event on standard error, and no secret in any of them.

The standard library's logging, so that a program that embeds Headwater configures it as usual; `configure` is for the
command line. Secrets are removed in the formatter, after arguments and tracebacks have become text: a filter on records would
miss both. So are control characters in names and messages of others: an entry begins at the start of a line, and nothing else
does.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping
from numbers import Number

from headwater.errors import HeadwaterError, Lines
from headwater.observability.outlet import STANDARD_ERROR
from headwater.observability.text import printable, printable_lines

log = logging.getLogger(__name__)

QUIET = {"py4j": logging.ERROR, "pyspark": logging.WARNING, "pyiceberg": logging.WARNING, "urllib3": logging.WARNING}

# Shorter ones would blot out ordinary words, and are no secrets in any case.
SHORTEST_SECRET = 4

_SHAPES = (
    # password=..., "password": "...", as connection strings, dictionaries and headers spell it
    re.compile(
        r"""(?P<keep>\b(?:password|secret|token)\b["']?\s*[=:]\s*)"""
        # The message about a setting that is missing or wrong is no secret: pg_connection.password: the environment ...
        r"""(?!the environment variable |the file |missing; |expected |must be |unknown setting)"""
        r"""(?:"[^"]*"|'[^']*'|[^\s,;&"')}]+)""",
        re.I,
    ),
    # scheme://user:password@host
    re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)[^\s@/]+(?=@)", re.I),
)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without the given secrets, and without what looks like one."""
    for secret in secrets:
        text = text.replace(secret, "***")
    for shape in _SHAPES:
        text = shape.sub(r"\g<keep>***", text)
    return text


class PlainFormatter(logging.Formatter):
    """`12:03:44 warning apply: text`, in UTC, the logger's name without the package."""

    converter = staticmethod(time.gmtime)

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        # The longest first: one secret may contain another. Escaped too: an argument is, before secrets are looked for.
        long = {secret for secret in secrets if len(secret) >= SHORTEST_SECRET}
        self._secrets = sorted(long | {printable(secret) for secret in long}, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("headwater.").replace(".", " ")
        text = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower()} {name}: {_message(record)}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return printable_lines(redact(text, self._secrets)).replace("\n", "\n  ")


def _message(record: logging.LogRecord) -> str:
    if not record.args:
        return str(record.msg)
    if isinstance(record.args, Mapping):
        return str(record.msg) % {name: _shown(value) for name, value in record.args.items()}
    return str(record.msg) % tuple(_shown(value) for value in record.args)


def _shown(value: object) -> object:
    """An argument as it may stand in an entry: on one line, unless its lines are ours."""
    if value is None or isinstance(value, Number):
        return value
    if isinstance(value, Lines):
        return value
    if isinstance(value, HeadwaterError):
        parts = (f"{name}: {text}" for name, text in (("detail", value.detail), ("hint", value.hint)) if text)
        return "\n".join([printable(value.message), *(part.replace("\n", "\n" + " " * 8) for part in parts)])
    return printable(str(value))


class _StandardError(logging.Handler):
    """Formats an entry when it is logged, since its arguments may change, and leaves the writing to a thread that may wait."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            STANDARD_ERROR.put(self.format(record) + "\n")
        except Exception as error:
            # The standard library would print the record to standard error from here, with its arguments as they are.
            where = f"{record.pathname}:{record.lineno}"
            STANDARD_ERROR.put(f"an entry of {where} could not be formatted: {type(error).__name__}\n")

    def flush(self) -> None:
        """At the end of the process, by the standard library."""
        STANDARD_ERROR.flush()


def configure(level: int = logging.INFO, secrets: Iterable[str] = ()) -> None:
    """Set up logging of the command line. Calling it again replaces what the last call set up."""
    handler = _StandardError()
    handler.setFormatter(PlainFormatter(secrets))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _StandardError)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("headwater").setLevel(level)
    for name, quiet in QUIET.items():
        logging.getLogger(name).setLevel(quiet)
    # Python prints them to standard error itself otherwise, from whatever thread they come up in.
    logging.captureWarnings(True)


def log_uncaught(failed: threading.ExceptHookArgs) -> None:
    """For `threading.excepthook`: what ends a thread is an entry of the log. Python would print a server's text as it is."""
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        name = failed.thread.name if failed.thread is not None else "unknown"
        told = (failed.exc_type, failed.exc_value, failed.exc_traceback)
        log.error("thread %s ended with an error that was not expected", name, exc_info=told)
