"""Runs something of a test's right after a call returns and before its caller goes on: a change between two reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest


@contextmanager
def run_after_call(called: str, action: Callable[[], None]) -> Iterator[None]:
    """`called` is a function or a method, as "module:name" or "module:Class.name". Until the block ends."""
    module, _, path = called.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original: Callable[..., Any] = getattr(owner, name)
    bound = isinstance(vars(owner).get(name), classmethod)

    def calling(*arguments: Any, **named: Any) -> Any:
        found = original(*arguments[1:], **named) if bound else original(*arguments, **named)
        action()
        return found

    patch = pytest.MonkeyPatch()
    patch.setattr(owner, name, classmethod(calling) if bound else calling)
    try:
        yield
    finally:
        patch.undo()
