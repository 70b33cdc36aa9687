"""Spark settings under which SQL text and names are taken literally, in every session that we make or are given.

By default Spark replaces `${x}` and `${env:SECRET}` in statements and in identifiers before it parses them, inside quotes too. A
schema of the source named `sh${x}op` would be written to the lake's `shop`, and a column's name could carry a variable of this
process's environment into the lake's metadata.
"""

from __future__ import annotations

from collections.abc import Iterable

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.errors import DestinationError, Retry

SUBSTITUTE = "spark.sql.variable.substitute"
SQL_TEXT = {
    SUBSTITUTE: "false",
    # With these, a name in backticks is a regular expression, and a backslash in a string is no escape.
    "spark.sql.parser.quotedRegexColumnNames": "false",
    "spark.sql.parser.escapedStringLiterals": "false",
}


class NameSubstituted(DestinationError):
    """A name that Spark would take for another one. Always the table's own error."""

    default_retry = Retry.MANUAL


_VARIABLE = "${"
"""Enough by itself: what closes it may stand in the next name of the statement."""


def switch_off(session: SparkSession) -> None:
    """Have SQL text taken literally. On a platform that does not allow these settings, `check_names` raises."""
    for key, value in SQL_TEXT.items():
        try:
            session.conf.set(key, value)
        except (PySparkException, Py4JError):
            continue


def check_names(names: Iterable[str], *sessions: SparkSession) -> None:
    """NameSubstituted for a name that one of these sessions would not take as it is."""
    found = next((name for name in names if _VARIABLE in name), None)
    if found is None:
        return
    for session in sessions:
        # The owner of a session that was given to us may have set it since.
        switch_off(session)
        if (session.conf.get(SUBSTITUTE, "true") or "").lower() != "false":
            raise NameSubstituted(
                f'Spark would replace part of the name "{found}"',
                detail=f"{SUBSTITUTE} is on in this Spark session and cannot be switched off; nothing was written",
                hint="Rename it in the source, or start the pipeline with a Spark session of its own.",
            )
