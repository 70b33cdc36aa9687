"""How a command says something: one line, in which a name of the source is text and nothing else."""

from __future__ import annotations

import click

from headwater.observability.text import printable


def say(line: str) -> None:
    click.echo(printable(line))
