"""The display while a pipeline runs: a live table on a terminal, plain lines everywhere else.

Both only read snapshots of the progress, and print to a console that never waits (`observability.outlet`): neither can slow the
pipeline down. They do not report errors: each is logged once, or ends the run, which reports it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headwater.observability.progress import Progress, ProgressSnapshot, TableProgress
from headwater.observability.text import printable

PLAIN_LOOK_SECONDS = 0.2
PLAIN_SUMMARY_SECONDS = 5.0
LIVE_REFRESH_PER_SECOND = 5
MOST_TABLES_SHOWN = 20

STATE_COLOURS = {"ready": "green", "errored": "red", "init": "dim"}


def size(count: float) -> str:
    """Bytes with a unit: 0 B, 640 B, 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def summary(snapshot: ProgressSnapshot) -> str:
    """One line: what was applied, how fast, how far behind."""
    parts = [
        f"{snapshot.changes:,} changes applied",
        f"{snapshot.changes_per_second:,.0f}/s",
        _lag(snapshot),
    ]
    if snapshot.hand_offs:
        parts.append(f"longest pause for a hand-off {snapshot.longest_pause_seconds:.2f} s")
    if snapshot.waiting:
        parts.append(f"waiting for {snapshot.waiting}")
    return "; ".join(parts)


def _lag(snapshot: ProgressSnapshot) -> str:
    lag = f"{size(snapshot.lag_bytes)}, {snapshot.lag_seconds:.1f} s"
    if snapshot.no_contact_seconds is None:
        return f"lag {lag}"
    return f"lag at least {lag} (the source has not answered for {snapshot.no_contact_seconds:.0f} s)"


class Display(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def display_for(progress: Progress, console: Console) -> Display:
    return LiveDisplay(progress, console) if console.is_terminal else PlainDisplay(progress, console)


class PlainDisplay:
    """A line for each state a table reaches, and a summary every few seconds if anything changed."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headwater-display", daemon=True)
        self._states: dict[int, tuple[str, str]] = {}
        self._summary = ""
        self._missed: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        looks = 0
        while not self._stop.wait(PLAIN_LOOK_SECONDS):
            looks += 1
            self.look(with_summary=looks % round(PLAIN_SUMMARY_SECONDS / PLAIN_LOOK_SECONDS) == 0)
        self.look(with_summary=True)

    def look(self, *, with_summary: bool) -> None:
        """Print what is new since the last look."""
        snapshot = self._progress.snapshot()
        # By their ids: dots can make one name of two tables.
        states = {table.id: (table.name, table.state) for table in snapshot.tables}
        for table in snapshot.tables:
            if self._states.get(table.id) != states[table.id]:
                self._line(f"{table.name}: {table.state}{_copied(table)}")
        for gone in self._states.keys() - states.keys():
            self._line(f"{self._states[gone][0]}: no longer in the publication")
        self._states = states
        if with_summary:
            missed = _missed(snapshot.tables)
            for text in missed:
                if text not in self._missed:
                    self._line(text)
            self._missed = missed
        line = summary(snapshot)
        is_telling = snapshot.changes or snapshot.waiting or snapshot.no_contact_seconds is not None
        if with_summary and is_telling and line != self._summary:
            self._summary = line
            self._line(line)

    def _line(self, text: str) -> None:
        # Text of tables and errors is data: no markup, no highlighting, no wrapping of a line that a program may read.
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _copied(table: TableProgress) -> str:
    if table.state != "finished_copy" or not table.copied_rows:
        return ""
    rate = f", {table.copied_rows / table.copy_seconds:,.0f} rows/s" if table.copy_seconds > 0 else ""
    return f" ({table.copied_rows:,} rows{rate})"


def _missed(tables: Iterable[TableProgress]) -> list[str]:
    return [
        f"{table.name}: {table.missed_changes:,} updates and deletes found no row in the lake"
        for table in tables
        if table.missed_changes
    ]


class LiveDisplay:
    """A compact table that redraws itself: a bar for each table that is being copied, states, rate and lag."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._live = Live(
            console=console,
            get_renderable=lambda: render(self._progress.snapshot()),
            refresh_per_second=LIVE_REFRESH_PER_SECOND,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()


def render(snapshot: ProgressSnapshot) -> RenderableType:
    grid = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    grid.add_column("table", no_wrap=True)
    grid.add_column("state", no_wrap=True)
    grid.add_column("copy", width=24)
    grid.add_column("rows copied", justify="right", no_wrap=True)
    shown = _most_interesting(snapshot.tables)
    for table in shown:
        phase = table.state.partition("(")[0]
        grid.add_row(
            Text(printable(table.name)),
            Text(table.state, style=STATE_COLOURS.get(phase, "yellow")),
            ProgressBar(total=1.0, completed=table.copy_fraction, width=24) if table.copying else "",
            f"{table.copied_rows:,}" if table.copied_rows else "",
        )
    lines: list[RenderableType] = [grid]
    if len(shown) < len(snapshot.tables):
        lines.append(Text(f"and {len(snapshot.tables) - len(shown)} more tables", style="dim"))
    lines.append(Text(printable(summary(snapshot)), style="bold"))
    lines += [Text(printable(line), style="yellow") for line in _missed(shown)]
    if any(table.state.startswith("errored") for table in snapshot.tables):
        lines.append(Text("`headwater tables` shows why a table stopped, and what to do", style="red"))
    return Group(*lines)


def _most_interesting(tables: tuple[TableProgress, ...]) -> list[TableProgress]:
    """Tables with an error first, then those being copied, then the rest; a screen has only so many lines."""
    order = {"errored": 0, "ready": 3, "init": 2}
    ranked = sorted(tables, key=lambda table: (order.get(table.state.partition("(")[0], 1), table.name))
    kept = {table.id for table in ranked[:MOST_TABLES_SHOWN]}
    return [table for table in tables if table.id in kept]
