"""`headwater remove`: removes a pipeline. Its slots and its state are dropped, the lake stays.

Slots first, because they hold WAL in the source. If it is interrupted after any step, the command can be run again.
"""

from __future__ import annotations

from pathlib import Path

import click

from headwater.cli.control import settings_of
from headwater.cli.say import say
from headwater.config import Settings, StoreType
from headwater.errors import PipelineLocked
from headwater.source.lock import PipelineLock
from headwater.source.session import connect
from headwater.source.slots import apply_slot_name, drop_slot, sync_slots
from headwater.store.from_settings import postgres_store
from headwater.wire.settings import ConnectSettings

_LOCK_SECONDS = 1.0


@click.command()
@click.argument("settings_file", type=click.Path(path_type=Path))
@click.option("--yes", is_flag=True, help="Don't ask.")
def remove(settings_file: Path, yes: bool) -> None:
    """Remove the pipeline that SETTINGS_FILE describes: drop its replication slots and delete its state.

    The tables in the lake stay as they are. A pipeline that is run again with this file copies all tables again.
    """
    settings = settings_of(settings_file)
    pipeline_id = settings.pipeline.id
    source = settings.pipeline.pg_connection.connect_settings("headwater remove")
    if not yes:
        click.confirm(f"Drop the slots and delete the state of pipeline {pipeline_id}? The lake is kept.", abort=True)
    lock = PipelineLock(source, pipeline_id)
    try:
        lock.acquire(_LOCK_SECONDS)
    except PipelineLocked as error:
        raise PipelineLocked(
            f"pipeline {pipeline_id} is running",
            detail=error.detail,
            hint="Stop it first (Ctrl-C or SIGTERM), then remove it.",
        ) from None
    try:
        slots = _drop_slots(source, pipeline_id)
        state = _delete_state(settings)
    finally:
        lock.release()
    found = [line for line in (slots, state) if line]
    if not found:
        where = f'database "{source.database}" at {source.address}'
        say(f"nothing was found: {where} has no replication slot and no state of pipeline {pipeline_id}")
        say("if you meant another pipeline: its number is `id` in its settings file")
    for line in found:
        say(line)


def _drop_slots(source: ConnectSettings, pipeline_id: int) -> str:
    """What was done, or nothing if there was none."""
    with connect(source) as connection:
        names = [apply_slot_name(pipeline_id), *(slot.name for slot in sync_slots(connection, pipeline_id))]
        dropped = [name for name in names if drop_slot(connection, name)]
    return f"dropped {', '.join(dropped)}" if dropped else ""


def _delete_state(settings: Settings) -> str:
    if settings.store.type is StoreType.MEMORY:
        return ""
    store = postgres_store(settings)
    try:
        removed = store.remove()
    finally:
        store.close()
    if not removed.rows:
        return "deleted the namespace headwater, which was empty" if removed.was_last else ""
    return "deleted its state" + (
        ", and the namespace headwater with it: no other pipeline used it" if removed.was_last else ""
    )
