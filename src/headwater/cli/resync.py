"""`headwater resync`: have tables copied again at the next run.

Only state is changed here, under the pipeline's lock. The lake keeps its rows until the new copy replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from headwater.assembly import build_store
from headwater.config import PipelineConfig, Settings, StoreType, load_settings
from headwater.contracts.stores import APPLY, PipelineStore
from headwater.errors import ConfigError, SourceError
from headwater.lsn import EndLsn
from headwater.observability.log import configure
from headwater.schema.table import quote_identifier
from headwater.source.lock import PipelineLock
from headwater.source.publication import published_tables
from headwater.source.session import Connection, connect
from headwater.source.slots import apply_slot_name, drop_slot
from headwater.states import INIT
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings


@click.command()
@click.argument("settings_file", type=click.Path(path_type=Path))
@click.argument("tables", nargs=-1)
@click.option(
    "--all", "everything", is_flag=True, help="All tables, with a new slot: the way out when the slot is lost."
)
def resync(settings_file: Path, tables: tuple[str, ...], everything: bool) -> None:
    """Copy TABLES, written namespace.name, again at the next run of the pipeline.

    The pipeline must not be running. Readers of the lake see the old rows until the new copy is complete.
    """
    if everything == bool(tables):
        raise click.UsageError("name the tables to copy again, or --all")
    settings = load_settings(settings_file)
    configure(secrets=settings.secrets())
    if settings.store.type is StoreType.MEMORY:
        raise ConfigError(
            "this pipeline has no state to change",
            detail='store.type is "memory", which forgets everything at the end of a run',
            hint="Start it again: every start copies all tables.",
        )
    source = settings.pipeline.pg_connection.connect_settings("headwater resync")
    with _opened(settings, source) as (connection, store):
        if everything:
            count = _all(settings.pipeline, source, connection, store)
        else:
            count = _some(settings.pipeline, tables, connection, store)
    noun = "table is" if count == 1 else "tables are"
    click.echo(f"{count} {noun} copied again when the pipeline is run: headwater run {settings_file}")


@contextmanager
def _opened(settings: Settings, source: ConnectSettings) -> Iterator[tuple[Connection, PipelineStore]]:
    lock = PipelineLock(source, settings.pipeline.id)
    lock.acquire()
    store = build_store(settings)
    try:
        with connect(source) as connection:
            store.start()
            store.load_table_states()
            yield connection, store
    finally:
        store.close()
        lock.release()


def _all(config: PipelineConfig, source: ConnectSettings, connection: Connection, store: PipelineStore) -> int:
    """States first: interrupted after any step, the next run copies everything or says that the slot is missing."""
    count = store.reset_table_states_for_resync()
    name = apply_slot_name(config.id)
    drop_slot(connection, name)
    with WireConnection.connect(source, replication=True) as replication:
        row = replication.query(f"CREATE_REPLICATION_SLOT {quote_identifier(name)} LOGICAL pgoutput")[0]
    position = row["consistent_point"]
    assert position is not None
    store.upsert_replication_progress(APPLY, EndLsn.parse(position))
    return count


def _some(config: PipelineConfig, tables: Sequence[str], connection: Connection, store: PipelineStore) -> int:
    published = {str(table.name): table.id for table in published_tables(connection, config.publication_name)}
    unknown = [table for table in tables if table not in published]
    if unknown:
        raise SourceError(
            f'publication "{config.publication_name}" has no table {", ".join(unknown)}',
            detail=f"it has {', '.join(sorted(published)) or 'none'}",
            hint="Write tables as namespace.name.",
        )
    store.update_table_states([(published[table], INIT) for table in dict.fromkeys(tables)])
    return len(set(tables))
