"""The entry point of the command line: which commands there are, and how an error is printed.

Commands are imported when they are called and not before: `headwater --help` must not wait for the import of pyspark. This
is the one place that imports by name.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from dataclasses import dataclass
from importlib.metadata import version

import click

from headwater.errors import ConfigError, HeadwaterError
from headwater.observability.log import configure, log_uncaught, redact
from headwater.observability.outlet import flush, standard_error
from headwater.observability.text import printable, printable_lines

FAILED, WRONG_USAGE = 1, 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """The module of a command, and its line in the overview."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "demo": LazyCommand("headwater.cli.demo", "demo", "Replicate a small shop on this machine and check every value."),
    "remove": LazyCommand("headwater.cli.remove", "remove", "Remove a pipeline: drop its slots, delete its state."),
    "resync": LazyCommand("headwater.cli.resync", "resync", "Copy tables again."),
    "rollback": LazyCommand(
        "headwater.cli.rollback", "rollback", "Retry a table that stopped with an error: copy it again."
    ),
    "run": LazyCommand("headwater.cli.run", "run", "Run a pipeline until it is stopped."),
    "tables": LazyCommand("headwater.cli.tables", "tables", "Show each table's state, position and error."),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        lazy = COMMANDS[cmd_name]
        try:
            module = importlib.import_module(lazy.module)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "headwater":
                raise
            raise HeadwaterError(
                f"`headwater {cmd_name}` needs the Python package {error.name}",
                detail="it belongs to an optional part of Headwater that is not installed",
                hint="Install it: pip install 'headwater[demo]'",
            ) from None
        command: click.Command = getattr(module, lazy.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("headwater"), message="headwater %(version)s")
def cli() -> None:
    """Keep lakehouse tables in step with Postgres."""


def show_error(error: HeadwaterError) -> None:
    """An error in its three parts on standard error; further lines of a part are indented under it.

    A message is one line: a line break in it came from a name or from a server.
    """
    parts = (
        ("error", printable(redact(error.message))),
        ("detail", printable_lines(redact(error.detail))),
        ("hint", printable_lines(redact(error.hint))),
    )
    for part, text in parts:
        if text:
            indented = text.replace("\n", "\n        ")
            styled = click.style(part + ":", bold=True, fg=_COLOURS[part])
            # Behind the log's entries, and like them not waited for: a process that ends with an error must not hang.
            click.echo(f"{styled} {indented}", file=standard_error())


_COLOURS = {"error": "red", "detail": None, "hint": "cyan"}


def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 after a clean stop, 1 after a failure, 2 for wrong usage or settings."""
    status: str | int | None = FAILED
    before, threading.excepthook = threading.excepthook, log_uncaught
    try:
        cli.main(args=arguments, prog_name="headwater")
    except HeadwaterError as error:
        show_error(error)
        status = WRONG_USAGE if isinstance(error, ConfigError) else FAILED
    except SystemExit as end:
        status = end.code
    except Exception:
        # As an entry of the log: what an error says may be a server's text, and Python would print it as it is.
        if not logging.getLogger().handlers:
            configure()
        log.critical("unexpected failure", exc_info=True)
    finally:
        threading.excepthook = before
        if not flush():
            # The interpreter's own end would wait for the same stream, or be aborted over its lock.
            os._exit(status if isinstance(status, int) else FAILED if status else 0)
    sys.exit(status)


if __name__ == "__main__":
    main()
