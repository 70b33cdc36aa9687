"""`headwater run`: runs a pipeline from a settings file until it is stopped or fails."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import click
from py4j.protocol import Py4JError
from rich.console import Console

from headwater.assembly import build, build_spark
from headwater.cli.display import display_for
from headwater.cli.signals import StopSignals
from headwater.config import Settings, StoreType, load_settings
from headwater.engine.pipeline import Pipeline
from headwater.observability.log import configure
from headwater.observability.outlet import standard_output
from headwater.observability.progress import Progress
from headwater.observability.text import printable
from headwater.source import preflight
from headwater.source.session import connect
from headwater.source.slots import apply_slot_name

STOPPING = (
    "stopping: the batch under way is written and confirmed first; "
    "a second Ctrl-C or SIGTERM ends at once and loses nothing"
)


@click.command()
@click.argument("settings_file", type=click.Path(path_type=Path))
@click.option("-v", "--verbose", is_flag=True, help="Log what the pipeline does, not only warnings and errors.")
def run(settings_file: Path, verbose: bool) -> None:
    """Run the pipeline that SETTINGS_FILE describes, until it is stopped.

    Ctrl-C or SIGTERM stops it in order: the batch under way is written and confirmed first. A second one ends it at
    once, and nothing is lost either: the next run continues from the confirmed position.
    """
    settings = load_settings(settings_file)
    configure(logging.INFO if verbose else logging.WARNING, settings.secrets())
    run_until_stopped(settings, Console(file=standard_output()), Progress())


def check_source(settings: Settings) -> None:
    """Check the source first, which takes a moment: Spark takes seconds to start, and would be started for nothing."""
    config = settings.pipeline
    with connect(config.pg_connection.connect_settings(f"headwater_{config.id}")) as connection:
        in_source = settings.store.type is StoreType.POSTGRES and config.store_pg_connection is None
        preflight.check_source(connection, config, store_in_source=in_source)


def _is_up(settings: Settings, progress: Progress) -> str:
    config, count = settings.pipeline, len(progress.snapshot().tables)
    tables = "1 table" if count == 1 else f"{count} tables"
    return (
        f'pipeline {config.id} is up: {tables} of publication "{config.publication_name}", '
        f"slot {apply_slot_name(config.id)}; Ctrl-C stops it in order"
    )


def run_until_stopped(settings: Settings, console: Console, progress: Progress) -> None:
    """Start Spark and the pipeline, show them, and stay until the pipeline has stopped; raises what made it fail."""
    pipeline: Pipeline | None = None

    def request_stop() -> None:
        # First: if printing the message fails, the pipeline must stop all the same.
        if pipeline is not None:
            pipeline.shutdown()
        console.print(STOPPING, highlight=False, soft_wrap=True)

    with StopSignals(request_stop) as signals:
        check_source(settings)
        console.print("starting Spark", highlight=False)
        spark = build_spark(settings)
        try:
            signals.arm()
            pipeline = build(settings, spark=spark, progress=progress)
            # A signal that came before there was a pipeline could not reach it.
            if signals.requested.is_set():
                return
            with display_for(progress, console):
                pipeline.start()
                if not pipeline.stopped:
                    console.print(printable(_is_up(settings, progress)), markup=False, highlight=False, soft_wrap=True)
                if signals.requested.is_set():
                    pipeline.shutdown()
                pipeline.wait()
            console.print("stopped", highlight=False)
        finally:
            # A JVM that has ended cannot be stopped.
            with suppress(Py4JError, OSError):
                spark.stop()
