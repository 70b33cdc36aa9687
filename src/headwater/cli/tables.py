"""`headwater tables`: what store and source show of a pipeline's tables. Reads only, whether the pipeline runs or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwater.cli.control import Controlled, controlled
from headwater.cli.display import STATE_COLOURS, size
from headwater.cli.say import say
from headwater.contracts.stores import APPLY
from headwater.observability.log import redact
from headwater.observability.text import printable, printable_lines
from headwater.source.server import flush_lsn
from headwater.source.slot_errors import LineageLost, slot_invalidated, slot_missing
from headwater.source.slots import apply_slot_name, inspect_slot
from headwater.states import INIT, Phase, TableState


@dataclass(frozen=True, slots=True)
class TableLine:
    name: str
    state: TableState
    position: str
    """The last change that the destination has, as far as it is recorded."""

    @property
    def error_lines(self) -> list[str]:
        """Reason, hint and next attempt, each with its name, for a table that stopped."""
        if self.state.phase is not Phase.ERRORED:
            return []
        policy = self.state.retry_policy
        at = policy.next_retry if policy is not None else None
        parts = {
            "reason": self.state.reason,
            "hint": self.state.solution,
            "next attempt": f"{at:%Y-%m-%d %H:%M:%S %Z}" if at is not None else "none without `headwater rollback`",
        }
        return [f"{name}: {printable_lines(redact(text))}" for name, text in parts.items() if text]


@click.command()
@click.argument("settings_file", type=click.Path(path_type=Path))
def tables(settings_file: Path) -> None:
    """Show the state of each table and the position it has reached; for one that stopped, why, and what to do."""
    with controlled(settings_file, "tables") as pipeline:
        loaded = pipeline.load()
        lines = _lines(pipeline)
        summary = _summary(pipeline, loaded)
        stopped = [line.name for line in lines if line.state.phase is Phase.ERRORED]
        if stopped:
            summary.append(f"after the cause is removed: {pipeline.command('rollback', stopped[0])}")
    console = Console()
    if console.is_terminal:
        _show(console, lines)
    else:
        _tell(lines)
    for text in summary:
        say(text)


def _lines(pipeline: Controlled) -> list[TableLine]:
    """A table that the pipeline has not noticed yet is shown in Init; one that left the publication is shown until the pipeline
    notices that."""
    store, states = pipeline.store, pipeline.store.get_table_states()
    names = {
        schema.id: f"{schema.name} (left the publication)"
        for schema in store.get_table_schemas()
        if schema.id in states
    }
    names |= {table_id: name for name, table_id in pipeline.published().items()}
    lines = []
    for table_id, name in sorted(names.items(), key=lambda item: item[1]):
        metadata = store.get_destination_table_metadata(table_id)
        mark = metadata.watermark if metadata is not None else None
        lines.append(TableLine(name, states.get(table_id, INIT), str(mark.commit_lsn) if mark is not None else ""))
    return lines


def _summary(pipeline: Controlled, loaded: bool) -> list[str]:
    """The state of the pipeline, and, if its slot is lost, what to do: a new start would only end with that error."""
    name = apply_slot_name(pipeline.config.id)
    doing = "running" if pipeline.is_running else "not running"
    slot = inspect_slot(pipeline.connection, name)
    recorded = pipeline.store.get_replication_progress(APPLY) if loaded else None
    if not slot.exists and recorded is None:
        return [f"pipeline {pipeline.config.id}: {doing}, never started: it has no replication slot and no progress"]
    parts = [doing, f"recorded {recorded}"]
    lost: LineageLost | None = None
    if not slot.exists:
        lost = slot_missing(name, recorded)
    elif slot.invalidated:
        lost = slot_invalidated(
            name, slot.wal_status, slot.invalidation_reason, slot.confirmed_flush, slot.wal_keep_limit
        )
    else:
        flush = flush_lsn(pipeline.connection)
        parts.append(f"confirmed {slot.confirmed_flush}")
        lag, retained = slot.lag_bytes(flush), slot.retained_bytes(flush)
        if lag is not None and retained is not None:
            parts.append(f"{size(lag)} behind, {size(retained)} of WAL held")
    lines = [f"pipeline {pipeline.config.id}: {', '.join(parts)}"]
    if lost is not None:
        lines += [f"error: {lost.message}", f"detail: {lost.detail}", f"hint: {lost.hint}"]
    return lines


def _tell(lines: list[TableLine]) -> None:
    """Plain lines. The lines of a table's error are indented under it, so that none can be taken for another table."""
    for line in lines:
        position = f" {line.position}" if line.position else ""
        say(f"{line.name}: {line.state}{position}")
        for part in line.error_lines:
            for number, text in enumerate(part.split("\n")):
                say(f"    {text}" if number else f"  {text}")


def _show(console: Console, lines: list[TableLine]) -> None:
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("table", "state", "position", "error"):
        grid.add_column(title, no_wrap=title != "error")
    for line in lines:
        colour = STATE_COLOURS.get(line.state.phase.value, "yellow")
        state, error = Text(str(line.state), colour), Text("\n".join(line.error_lines))
        grid.add_row(Text(printable(line.name)), state, Text(line.position), error)
    console.print(grid)
