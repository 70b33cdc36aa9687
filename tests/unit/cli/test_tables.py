"""The table that `headwater tables` shows on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from headwater.cli.tables import TableLine, _show
from headwater.errors import SchemaError
from headwater.states import READY, errored


def test_a_table_that_stopped_shows_why_and_what_to_do() -> None:
    out = io.StringIO()
    error = SchemaError("no key", detail="password=hunter2", hint="Add [one].")
    lines = [TableLine("public.a", READY, "0/16B3748"), TableLine("public.[b]", errored(error), "")]
    _show(Console(file=out, width=120), lines)
    said = out.getvalue()
    assert "public.a    ready    0/16B3748" in said
    assert "public.[b]  errored             reason: no key" in said
    assert "hint: Add [one]." in said
    assert "next attempt: none without `headwater rollback`" in said
    assert "hunter2" not in said
