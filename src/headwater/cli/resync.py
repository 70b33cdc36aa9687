"""`headwater resync`: tables are copied again, now if the pipeline runs, else at its next start.

Only state is changed here. The lake keeps its rows until the new copy replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from headwater.cli.control import Controlled, controlled
from headwater.cli.say import say
from headwater.contracts.stores import APPLY
from headwater.errors import PipelineLocked
from headwater.schema.table import TableId
from headwater.source.lock import PipelineLock
from headwater.source.slots import apply_slot_name, create_slot, drop_slot
from headwater.states import to_be_copied
from headwater.wire.connection import WireConnection

_LOCK_SECONDS = 1.0


@click.command()
@click.argument("settings_file", type=click.Path(path_type=Path))
@click.argument("tables", nargs=-1)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="All tables. If the pipeline is stopped, its replication slot is created again.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Replace the rows of a lake table that belongs to another pipeline, cluster or database. Only with TABLES.",
)
def resync(settings_file: Path, tables: tuple[str, ...], everything: bool, take_over: bool) -> None:
    """Copy TABLES, written namespace.name, again: at once if the pipeline runs, else at its next start.

    Readers of the lake see the old rows until the new copy is complete.
    """
    if everything == bool(tables):
        raise click.UsageError("name the tables to copy again, or --all")
    if everything and take_over:
        raise click.UsageError("name the tables to take over; --all does not go with --take-over")
    with controlled(settings_file, "resync") as pipeline:
        # Before the store is started, which creates its tables: a wrong name leaves nothing behind.
        wanted = [] if everything else _wanted(pipeline, tables)
        pipeline.store.start()
        pipeline.store.load_table_states()
        count = _all(pipeline) if everything else _some(pipeline, wanted, take_over)
        noun = "table is" if count == 1 else "tables are"
        say(f"{count} {noun} copied again {pipeline.when()}")


def _all(pipeline: Controlled) -> int:
    """Under the pipeline's lock, if it is free: the slot may be created again only while no run follows it."""
    lock = PipelineLock(pipeline.source, pipeline.config.id)
    try:
        lock.acquire(_LOCK_SECONDS)
    except PipelineLocked:
        # It runs, so its slot is in use, and only new copies are needed.
        states = pipeline.store.get_table_states()
        _ask(pipeline, list(states))
        return len(states)
    try:
        return _all_with_a_new_slot(pipeline)
    finally:
        lock.release()


def _all_with_a_new_slot(pipeline: Controlled) -> int:
    """States first: if it is interrupted after any step, the next run copies everything or reports that the slot is missing."""
    count = pipeline.store.reset_table_states_for_resync()
    name = apply_slot_name(pipeline.config.id)
    drop_slot(pipeline.connection, name)
    with WireConnection.connect(pipeline.source, replication=True) as replication:
        position = create_slot(replication, name, failover=pipeline.config.failover_slot)
    pipeline.store.upsert_replication_progress(APPLY, position)
    return count


def _wanted(pipeline: Controlled, tables: Sequence[str]) -> list[TableId]:
    known = pipeline.published()
    unknown = [table for table in tables if table not in known]
    if unknown:
        raise pipeline.unknown(unknown, known)
    return [known[table] for table in dict.fromkeys(tables)]


def _some(pipeline: Controlled, tables: Sequence[TableId], take_over: bool) -> int:
    _ask(pipeline, tables, take_over)
    return len(tables)


def _ask(pipeline: Controlled, tables: Sequence[TableId], take_over: bool = False) -> None:
    states = pipeline.store.get_table_states()
    wanted = [(table, to_be_copied(states.get(table), take_over=take_over)) for table in tables]
    pipeline.store.update_table_states(wanted)
