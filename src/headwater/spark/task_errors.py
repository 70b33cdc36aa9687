"""Errors of ours on their way from an executor to the driver: whole, and not to be mistaken for anything else.

A task's exception reaches the driver as text in a traceback. So an error of ours adds a line that holds it as JSON, behind a
key that this driver made and that only its own tasks know: a value of a row that appears in some other error's text is never
taken for one. Nothing is unpickled, and only classes of `headwater.errors` come out.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
import secrets
from collections.abc import Iterable, Iterator

import pyarrow as pa

from headwater.errors import HeadwaterError, error_from_json, error_to_json, show_values, values_are_shown
from headwater.spark.map_in_arrow import ArrowFunction

_KEY = secrets.token_hex(16)


class TaskFailed(Exception):
    """What a task raises for an error of ours: its text for people, then the line for the driver."""


def telling(function: ArrowFunction) -> ArrowFunction:
    """The same function, for a task: errors of ours that it raises arrive whole."""
    key, shown = _KEY, values_are_shown()  # travel with the function

    @functools.wraps(function)  # plans and pages of Spark show its name
    def tell(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        show_values(shown)
        try:
            yield from function(batches)
        except HeadwaterError as error:
            raise TaskFailed(f"{error}\n{marked(error, key)}") from None

    return tell


def marked(error: HeadwaterError, key: str = _KEY) -> str:
    return f"headwater-error:{key}:{base64.urlsafe_b64encode(to_text(error).encode()).decode()}:"


def found_in(text: str) -> HeadwaterError | None:
    """The last error that a task of this driver reported, if the text has one."""
    *_, found = [None, *re.findall(rf"headwater-error:{_KEY}:([\w=-]+):", text)]
    try:
        return None if found is None else from_text(base64.urlsafe_b64decode(found).decode())
    except (ValueError, KeyError, TypeError, binascii.Error):
        return None  # the text was cut


def to_text(error: HeadwaterError) -> str:
    return json.dumps(error_to_json(error))


def from_text(text: str) -> HeadwaterError:
    return error_from_json(json.loads(text))
