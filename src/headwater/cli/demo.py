"""`headwater demo`: a Postgres server, a shop database with writes, a lake that follows them, and a check of every value.

Ends with status 0 only if source and lake are equal.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click
from py4j.protocol import Py4JError
from rich.console import Console

from headwater.assembly import build, build_spark
from headwater.cli.demo_report import ComparedTable, Facts, MeasuredProgress, Steps, how_to_open, lags, show_comparison
from headwater.cli.display import display_for
from headwater.cli.signals import StopSignals
from headwater.config import DestinationConfig, PgConnectionConfig, PipelineConfig, Settings
from headwater.engine.pipeline import Pipeline
from headwater.errors import HeadwaterError, ShutdownRequested
from headwater.observability.log import configure
from headwater.observability.outlet import standard_output
from headwater.observability.progress import ProgressSnapshot
from headwater.observability.text import printable_lines
from headwater.private_files import make_directory
from headwater.source.slots import apply_slot_name
from headwater.testing.compare import (
    TableComparison,
    compare_table,
    confirmed_position,
    flush_position,
    wait_until,
)
from headwater.testing.lake_rows import open_lake
from headwater.testing.postgres import PostgresServer
from headwater.testing.shop import PUBLICATION, TABLES, ShopWriter, create_shop
from headwater.testing.source_rows import Connection
from headwater.wire.settings import ConnectSettings

PIPELINE_ID = 1
READY_SECONDS = 120.0
CATCH_UP_SECONDS = 120.0
LOOK_SECONDS = 0.1


@click.command()
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the lake in this directory, which must be new or empty. By default it is a new one in the system's "
    "directory for temporary files.",
)
@click.option("--rows", default=200_000, show_default=True, type=click.IntRange(1_000), help="Rows to start with.")
@click.option(
    "--seconds",
    default=15.0,
    show_default=True,
    type=click.FloatRange(0),
    help="How long to continue writing after the copy.",
)
def demo(keep: Path | None, rows: int, seconds: float) -> None:
    """Replicate a small shop on this machine, and compare every value.

    Starts its own Postgres server, fills it, and writes to it continuously while its tables are copied into an Iceberg
    lake and followed. Then stops, and compares source and lake with an engine that did not write the lake.
    """
    configure(logging.WARNING)
    warehouse = _warehouse(keep)
    console = Console(file=standard_output())
    comparisons = Demo(console, warehouse, rows, seconds).run()
    if not all(one.equal for one in comparisons):
        raise HeadwaterError(
            "the lake differs from the source",
            detail="\n".join(str(one) for one in comparisons if not one.equal),
            hint=f"This is a defect of Headwater; report it with the lines above. The lake is in {warehouse}.",
        )


def _warehouse(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="headwater-demo-"))
    if keep.exists() and any(keep.iterdir()):
        raise click.BadParameter(f"{keep} is not empty; name a new directory", param_hint="--keep")
    return make_directory(keep).resolve()


class Demo:
    """One run, step by step."""

    def __init__(self, console: Console, warehouse: Path, rows: int, seconds: float) -> None:
        self._console = console
        self._steps = Steps(console)
        self._warehouse = warehouse
        self._rows = rows
        self._seconds = seconds
        self._progress = MeasuredProgress()
        self._pipeline: Pipeline | None = None
        self._signals = StopSignals(self._request_stop)

    def run(self) -> list[TableComparison]:
        with ExitStack() as stack:
            stack.enter_context(self._signals)
            with self._steps.step("Postgres started") as outcome:
                server = stack.enter_context(PostgresServer.start())
                outcome.append(f"version {server.version // 10_000}.{server.version % 10_000}")
            source = stack.enter_context(server.connect())
            with self._steps.step("shop created") as outcome:
                counts = create_shop(source, self._rows)
                outcome.append(f"{sum(counts.values()):,} rows in {len(counts)} tables")
            settings = self._settings(server.settings())
            with self._steps.step("Spark started"):
                spark = build_spark(settings)
                stack.callback(_stop_quietly, spark.stop)
                self._signals.arm()
            self._pipeline = build(settings, spark=spark, progress=self._progress)
            writer = ShopWriter(server.connect, counts)
            facts = self._replicate(self._pipeline, writer, source)
            with self._steps.step("every value compared"):
                lake = open_lake(self._warehouse)
                comparisons = [compare_table(source, name, lake) for name in TABLES]
        self._report(facts, comparisons)
        return comparisons

    def _replicate(self, pipeline: Pipeline, writer: ShopWriter, source: Connection) -> Facts:
        """Copy and follow while the writer writes, until the lake has everything and the pipeline has stopped."""
        start = time.monotonic()
        with display_for(self._progress, self._console), _stopped_at_the_end(pipeline):
            pipeline.start()
            writer.start()
            try:
                self._await(_all_ready, READY_SECONDS, "the tables to be ready", writer)
                ready_at = time.monotonic()
                ready_seconds = ready_at - start
                written = ready_at + self._seconds
                self._await(lambda _: time.monotonic() > written, self._seconds + 1, "the writer", writer)
            finally:
                writer.stop()
            target = flush_position(source)
            slot = apply_slot_name(PIPELINE_ID)
            # Asked of the server: confirming to it is the last step.
            self._await(
                lambda _: confirmed_position(source, slot) >= target, CATCH_UP_SECONDS, "the lake to catch up", writer
            )
        end = self._progress.snapshot()
        self._steps.done("copied and followed, then stopped", "", time.monotonic() - start)
        after_copy = ((one.position, one.committed_at) for one in writer.samples if one.committed_at >= ready_at)
        return Facts(
            end.copied_rows,
            ready_seconds,
            end.changes,
            writer.transactions,
            lags(after_copy, self._progress),
            end.hand_offs,
            end.longest_pause_seconds,
        )

    def _await(
        self, condition: Callable[[ProgressSnapshot], bool], timeout: float, what: str, writer: ShopWriter
    ) -> None:
        """Wait, unless the pipeline, a table or the writer fails first, or the user stops the demo."""

        def still_good() -> None:
            writer.check()
            if self._signals.requested.is_set():
                raise ShutdownRequested(
                    "the demo was stopped before the comparison", hint="Run `headwater demo` again."
                )
            if self._pipeline is not None and self._pipeline.stopped:
                self._pipeline.wait()
            if _errored(self._progress.snapshot()):
                raise self._late(what)

        try:
            wait_until(
                lambda: condition(self._progress.snapshot()), timeout, interval=LOOK_SECONDS, still_good=still_good
            )
        except TimeoutError:
            raise self._late(f"{what} for {timeout:.0f} s") from None

    def _late(self, what: str) -> HeadwaterError:
        snapshot = self._progress.snapshot()
        states = ", ".join(f"{name} {state}" for name, state in snapshot.states().items())
        hint = "On a slow machine try fewer rows: headwater demo --rows 20000"
        if snapshot.errors:
            hint = "See the errors above. The demo creates its own tables, so this is a defect of Headwater; report it."
        return HeadwaterError(
            f"the demo waited too long for {what}",
            detail="\n".join([f"tables: {states or 'none'}", *snapshot.errors]),
            hint=hint,
        )

    def _settings(self, source: ConnectSettings) -> Settings:
        connection = PgConnectionConfig(
            host=source.host, port=source.port, name=source.database, username=source.username, password=source.password
        )
        return Settings(
            pipeline=PipelineConfig(id=PIPELINE_ID, publication_name=PUBLICATION, pg_connection=connection),
            destination=DestinationConfig(warehouse=str(self._warehouse)),
        )

    def _request_stop(self) -> None:
        if self._pipeline is not None:
            self._pipeline.shutdown()

    def _report(self, facts: Facts, comparisons: list[TableComparison]) -> None:
        tables = [
            ComparedTable(str(one.table), one.source_rows, one.differing, one.missing, one.extra) for one in comparisons
        ]
        show_comparison(self._console, tables)
        for line in facts.lines():
            self._console.print(line, highlight=False, soft_wrap=True)
        self._console.print()
        self._console.print(
            printable_lines(how_to_open(self._warehouse)), markup=False, highlight=False, soft_wrap=True
        )


@contextmanager
def _stopped_at_the_end(pipeline: Pipeline) -> Iterator[None]:
    """Stop the pipeline in order. An error inside is raised first: an error while stopping would hide it."""
    try:
        yield
    except BaseException:
        pipeline.shutdown()
        with suppress(HeadwaterError):
            pipeline.wait()
        raise
    pipeline.shutdown()
    pipeline.wait()


def _all_ready(snapshot: ProgressSnapshot) -> bool:
    return len(snapshot.tables) >= len(TABLES) and set(snapshot.states().values()) == {"ready"}


def _errored(snapshot: ProgressSnapshot) -> bool:
    return any(state.startswith("errored") for state in snapshot.states().values())


def _stop_quietly(stop: Callable[[], None]) -> None:
    with suppress(Py4JError, OSError):
        stop()
