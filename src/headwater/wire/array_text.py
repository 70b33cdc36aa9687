"""Postgres's text form of arrays. Only streams that had to ask for text need it, so it is plain Python."""

from __future__ import annotations

import pyarrow as pa

from headwater.errors import ProtocolError


def parse_array_text(text: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array | None] | None:
    """(offsets, elements as text, mask of NULL arrays), or None when one of them is not a plain list."""
    offsets = [0]
    elements: list[str | None] = []
    nulls = []
    for value in text.to_pylist():
        nulls.append(value is None)
        if value is not None:
            items = _items(value)
            if items is None:
                return None
            elements.extend(items)
        offsets.append(len(elements))
    mask = pa.array(nulls) if any(nulls) else None
    return pa.array(offsets, pa.int32()), pa.array(elements, pa.string()), mask


def _items(value: str) -> list[str | None] | None:
    if not value.startswith("{"):
        return None  # "[0:1]={...}": a lower bound other than 1
    if not value.endswith("}") or len(value) < 2:
        raise ProtocolError("not the text of an array", offset=len(value))
    items: list[str | None] = []
    i, stop = 1, len(value) - 1
    while i < stop:
        if value[i] == "{":
            return None
        if value[i] == '"':
            item, i = _quoted(value, i + 1, stop)
            items.append(item)
        else:
            end = value.find(",", i, stop)
            end = stop if end < 0 else end
            items.append(None if value[i:end] == "NULL" else value[i:end])
            i = end
        if i < stop:
            if value[i] != ",":
                raise ProtocolError("not the text of an array", offset=i)
            i += 1
    return items


def _quoted(value: str, i: int, stop: int) -> tuple[str, int]:
    parts: list[str] = []
    while i < stop:
        character = value[i]
        if character == '"':
            return "".join(parts), i + 1
        if character == "\\":
            i += 1
        parts.append(value[i])
        i += 1
    raise ProtocolError("an array's quoted element does not end", offset=i)
