"""The output of the demo: its steps, what it measured, and how to open the tables it leaves.

Handles rows, seconds and texts only; `headwater.cli.demo` does the work.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headwater.observability.progress import Progress
from headwater.observability.text import printable
from headwater.spark.jars import JARS


class MeasuredProgress(Progress):
    """Progress that also remembers when each position was confirmed."""

    def __init__(self) -> None:
        super().__init__()
        self._times: list[float] = []
        self._positions: list[int] = []

    def position(self, received: int, confirmed: int, server: int) -> None:
        if not self._positions or confirmed > self._positions[-1]:
            # The time first: a reader that looks a position up finds a time for it.
            self._times.append(time.monotonic())
            self._positions.append(confirmed)
        super().position(received, confirmed, server)

    def confirmed_at(self, position: int) -> float | None:
        """When everything before `position` was confirmed, by `time.monotonic`."""
        index = bisect_left(self._positions, position)
        return self._times[index] if index < len(self._positions) else None


def lags(samples: Iterable[tuple[int, float]], progress: MeasuredProgress) -> list[float]:
    """Seconds from each commit until it was durable, recorded and confirmed; samples are (position, time)."""
    found = ((progress.confirmed_at(position), committed_at) for position, committed_at in samples)
    return sorted(max(0.0, visible - committed) for visible, committed in found if visible is not None)


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the smallest that at least this share of them does not exceed."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


class Steps:
    """One line a step, with the time it took: a spinner on a terminal, plain text elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, text: str) -> Iterator[list[str]]:
        """Show the step while it runs; texts appended to the list become its outcome."""
        outcome: list[str] = []
        start = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(text):
                yield outcome
        else:
            yield outcome
        self.done(text, "; ".join(outcome), time.monotonic() - start)

    def done(self, text: str, outcome: str, seconds: float) -> None:
        line = escape(printable(f"{text}: {outcome}" if outcome else text))
        self._console.print(f"[green]✓[/green] {line} [dim]({seconds:.1f} s)[/dim]", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class ComparedTable:
    name: str
    rows: int
    differing: int
    missing: int
    extra: int

    @property
    def equal(self) -> bool:
        return not (self.differing or self.missing or self.extra)


def show_comparison(console: Console, tables: Sequence[ComparedTable]) -> None:
    shown = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2, title="source against lake, every value")
    shown.add_column("table")
    for heading in ("rows", "differing", "missing", "extra"):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    for one in tables:
        verdict = "[green]equal[/green]" if one.equal else "[red]not equal[/red]"
        counts = (one.rows, one.differing, one.missing, one.extra)
        shown.add_row(Text(printable(one.name)), *(f"{count:,}" for count in counts), verdict)
    console.print(shown)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured in one run."""

    rows_copied: int
    copy_seconds: float
    """From the start of the pipeline until every table was ready."""
    changes: int
    transactions: int
    lags: Sequence[float]
    hand_offs: int = 0
    longest_pause_seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        rate = self.rows_copied / self.copy_seconds if self.copy_seconds else 0.0
        yield (
            f"copied    {self.rows_copied:,} rows while they were written to; all tables ready after "
            f"{self.copy_seconds:.1f} s ({rate:,.0f} rows/s)"
        )
        yield f"followed  {self.changes:,} changes of {self.transactions:,} transactions"
        if self.hand_offs:
            hand_offs = "1 hand-off" if self.hand_offs == 1 else f"{self.hand_offs:,} hand-offs"
            yield f"paused    {self.longest_pause_seconds:.2f} s at most, in {hand_offs}"
        if self.lags:
            middle, high = percentile(self.lags, 0.5), percentile(self.lags, 0.99)
            yield (
                f"lag       {middle:.2f} s median, {high:.2f} s at the 99th percentile, from commit in Postgres to "
                f"durable and confirmed ({len(self.lags):,} transactions)"
            )


def how_to_open(warehouse: Path) -> str:
    packages = ",".join(str(jar) for jar in JARS)
    catalog = {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".type": "jdbc",
        ".uri": f"jdbc:sqlite:{warehouse}/catalog.db",
        ".warehouse": str(warehouse),
    }
    settings = " \\\n".join(f"      --conf spark.sql.catalog.lake{name}={value}" for name, value in catalog.items())
    return f"""The tables are in {warehouse}. Open them in Python:

    from pyiceberg.catalog.sql import SqlCatalog
    lake = SqlCatalog("lake", uri="sqlite:///{warehouse}/catalog.db")
    print(lake.load_table("public.orders").scan(limit=5).to_arrow())

or in Spark:

    spark-sql --packages {packages} \\
{settings} \\
      -e "select status, count(*), sum(total) from lake.public.orders group by status"
"""
