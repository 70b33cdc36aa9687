"""Errors of Spark, Iceberg and Arrow as ours, without values of rows (invariant 16).

Their messages quote what could not be cast, and the keys of a batch as part of a predicate. The rest is enough to find the cause.
"""

from __future__ import annotations

import re

from headwater.errors import HeadwaterError, values_are_shown
from headwater.spark.errors import translate

_LEFT_OUT = "the rest is not shown, since it may hold values of rows"
# Classes 22 and 23 of SQLSTATE: data exceptions and violated constraints.
_OF_DATA = re.compile(r"SQLSTATE:\s*2[23]\w{3}")
_CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\]")
_PREDICATES = (
    (re.compile(r"(records matching ).*", re.DOTALL), r"\1..."),
    (re.compile(r"(\bIN\s*)\([^)]*\)?", re.IGNORECASE), r"\1(...)"),
    (re.compile(r"(\bBETWEEN\s+)\S+(\s+AND\s+)\S+", re.IGNORECASE), r"\1...\2..."),
    (re.compile(r"([<>=]=?\s*)(-?\d[\w.]*|'[^']*'|\"[^\"]*\")"), r"\1..."),
)


def translated(error: BaseException) -> HeadwaterError:
    """An error of the lake as an error of ours. One that is ours already stays as it is."""
    found = translate(error)
    if found is error:
        return found
    detail = without_values(error, found.detail)
    if detail == found.detail:
        return found
    return type(found)(found.message, detail=detail, hint=found.hint, retry=found.retry)


def without_values(error: BaseException, detail: str) -> str:
    if values_are_shown():
        return detail
    if isinstance(error, (ValueError, TypeError, ArithmeticError, LookupError)):
        # Arrow's and Python's own: the message is the value.
        return f"{type(error).__name__}: {_LEFT_OUT}"
    if _OF_DATA.search(str(error)):
        condition = _CONDITION.search(str(error))
        return f"{type(error).__name__}: {condition[0] if condition else 'a data exception'}; {_LEFT_OUT}"
    for pattern, shorter in _PREDICATES:
        detail = pattern.sub(shorter, detail)
    return detail
