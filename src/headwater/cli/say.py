"""How a command prints a line: a name from the source is printed as text, without markup or control characters."""

from __future__ import annotations

import click

from headwater.observability.text import printable


def say(line: str) -> None:
    click.echo(printable(line))
