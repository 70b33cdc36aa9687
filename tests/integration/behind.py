"""Something that happens right behind a read, before the reader goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest


@contextmanager
def behind(read: str, meanwhile: Callable[[], None]) -> Iterator[None]:
    """`read` is a function or a method, as "module:name" or "module:Class.name"."""
    module, _, path = read.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original: Callable[..., Any] = getattr(owner, name)
    bound = isinstance(vars(owner).get(name), classmethod)

    def reading(*arguments: Any, **named: Any) -> Any:
        found = original(*arguments[1:], **named) if bound else original(*arguments, **named)
        meanwhile()
        return found

    patch = pytest.MonkeyPatch()
    patch.setattr(owner, name, classmethod(reading) if bound else reading)
    try:
        yield
    finally:
        patch.undo()
