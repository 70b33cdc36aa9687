"""What the commands share that show or change a pipeline from another process: its settings, its state, its source.

None of them starts Spark or imports it. A running pipeline reads its states every few seconds and takes an Init that another
process has recorded as a request for a new copy, so setting one needs no lock and works whether the pipeline runs or not.
"""

from __future__ import annotations

import difflib
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headwater.config import PipelineConfig, Settings, StoreType, load_settings
from headwater.errors import ConfigError, SourceError
from headwater.observability.log import configure
from headwater.schema.table import TableId
from headwater.source.lock import is_locked
from headwater.source.publication import published_tables
from headwater.source.session import Connection, connect
from headwater.store.from_settings import postgres_store
from headwater.store.postgres import PostgresStore
from headwater.wire.settings import ConnectSettings

_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Controlled:
    """The pipeline that a command works on."""

    config: PipelineConfig
    settings_file: Path
    source: ConnectSettings
    connection: Connection
    store: PostgresStore

    @property
    def is_running(self) -> bool:
        return is_locked(self.connection, self.config.id)

    def when(self) -> str:
        """When the requested copy starts."""
        if self.is_running:
            return "now; the pipeline is running"
        return f"when the pipeline is started: {self.command('run')}"

    def load(self) -> bool:
        """Read the states into the store's cache; False if there are none, because the pipeline was never started."""
        if not self.store.exists():
            return False
        self.store.load_table_states()
        self.store.load_table_schemas()
        self.store.load_destination_tables_metadata()
        return True

    def published(self) -> dict[str, TableId]:
        """Tables by the name a user writes: namespace.name, or both quoted where dots make one name of two tables."""
        tables = published_tables(self.connection, self.config.publication_name)
        count = Counter(str(table.name) for table in tables)
        return {table.name.quoted if count[str(table.name)] > 1 else str(table.name): table.id for table in tables}

    def command(self, name: str, *tables: str) -> str:
        """One of our commands, as a shell takes it."""
        return shlex.join(["headwater", name, str(self.settings_file), *tables])

    def unknown(self, tables: list[str], known: dict[str, TableId]) -> SourceError:
        """Names that the publication does not have, with similar names that it has."""
        names = sorted(known)
        more = len(names) - _NAMES_SHOWN
        listed = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        near = dict.fromkeys(name for table in tables for name in _nearest(table, names))
        meant = f"Did you mean {' or '.join(near)}? " if near else ""
        return SourceError(
            f'publication "{self.config.publication_name}" has no table {", ".join(tables)}',
            detail=f"it has {listed or 'none'}",
            hint=f"{meant}Tables are written namespace.name, without quotes; to list them: {self.command('tables')}",
        )


def _nearest(table: str, names: list[str]) -> list[str]:
    """By the table's own name: the namespace is often the same for all, or was left out."""
    own: dict[str, list[str]] = {}
    for name in names:
        own.setdefault(name.partition(".")[2], []).append(name)
    return [name for near in difflib.get_close_matches(table.rpartition(".")[2], own, n=1) for name in own[near]]


def settings_of(settings_file: Path) -> Settings:
    settings = load_settings(settings_file)
    configure(secrets=settings.secrets())
    return settings


@contextmanager
def controlled(settings_file: Path, command: str) -> Iterator[Controlled]:
    settings = settings_of(settings_file)
    if settings.store.type is StoreType.MEMORY:
        raise ConfigError(
            "this pipeline has no recorded state",
            detail='store.type is "memory", which loses all state at the end of a run',
            hint="Start the pipeline again: every start copies all tables.",
        )
    source = settings.pipeline.pg_connection.connect_settings(f"headwater {command}")
    store = postgres_store(settings)
    try:
        with connect(source) as connection:
            yield Controlled(settings.pipeline, settings_file, source, connection, store)
    finally:
        store.close()
