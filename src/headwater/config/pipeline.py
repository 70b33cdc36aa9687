"""The settings of a pipeline: which publication, from where, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from headwater.config.connection import PgConnectionConfig
from headwater.setting_rules import Checked, Mistake, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig(Checked):
    # supabase/etl waits up to 10 s; one of ours leaves as soon as the destination is free and the socket dry.
    max_fill_ms: Annotated[
        int,
        Setting("How long a batch is collected at most; it is written earlier if the destination is idle.", above=0),
    ] = 1_000
    memory_budget_ratio: Annotated[
        float,
        Setting(
            "The share of memory that all streams may use together; larger transactions are written to disk.",
            above=0,
            at_most=1,
        ),
    ] = 0.2
    max_bytes: Annotated[int, Setting("The size at which a batch is written, in bytes of changes.", above=0)] = (
        64 * 1024**2
    )
    spool_directory: Annotated[
        str | None,
        Setting(
            "The directory for transactions that exceed the memory budget; on a disk, not on tmpfs. Without it: the system's "
            "directory for temporary files.",
            not_empty=True,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBackpressureConfig(Checked):
    activate: Annotated[
        float, Setting("Reading pauses when this share of the memory is in use.", above=0, at_most=1)
    ] = 0.85
    resume: Annotated[
        float, Setting("Reading continues below this share; less than `activate`.", above=0, at_most=1)
    ] = 0.75

    def conflicts(self) -> Iterator[Mistake]:
        if self.resume >= self.activate:
            yield Mistake("resume", f"must be below activate ({self.activate:g}), found {self.resume:g}")


class TableSyncCopyMode(StrEnum):
    INCLUDE_ALL = "include_all"
    SKIP_ALL = "skip_all"
    INCLUDE_TABLES = "include_tables"
    SKIP_TABLES = "skip_tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSyncCopyConfig(Checked):
    mode: Annotated[
        TableSyncCopyMode,
        Setting("Which tables' existing rows are copied. A table that is skipped is created empty and followed."),
    ] = TableSyncCopyMode.INCLUDE_ALL
    tables: Annotated[
        tuple[str, ...], Setting('The tables for `include_tables` or `skip_tables`, as `"namespace.name"`.')
    ] = ()

    @property
    def _names_tables(self) -> bool:
        return self.mode in (TableSyncCopyMode.INCLUDE_TABLES, TableSyncCopyMode.SKIP_TABLES)

    def conflicts(self) -> Iterator[Mistake]:
        if self._names_tables != bool(self.tables):
            needed = "needs at least one table" if self._names_tables else "takes no tables"
            yield Mistake("tables", f'mode = "{self.mode}" {needed}')
        for table in self.tables:
            if "." not in table.strip("."):
                yield Mistake("tables", f'expected "namespace.name", found "{table}"')

    def copies(self, table: str) -> bool:
        """Whether the existing rows of `namespace.name` are copied."""
        if self._names_tables:
            return (table in self.tables) == (self.mode is TableSyncCopyMode.INCLUDE_TABLES)
        return self.mode is TableSyncCopyMode.INCLUDE_ALL


class InDoubt(StrEnum):
    COPY = "copy"


class InvalidatedSlotBehavior(StrEnum):
    ERROR = "error"
    RECREATE = "recreate"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(Checked):
    what: ClassVar[str] = "the pipeline's settings"

    # The id is part of slot names and of advisory lock keys.
    id: Annotated[
        int,
        Setting(
            "The pipeline's number, part of the names of its slots and the key of its state. Each pipeline of a source server "
            "needs its own.",
            at_least=1,
            at_most=2**31 - 1,
        ),
    ]
    publication_name: Annotated[str, Setting("The publication to follow.", not_empty=True)]
    pg_connection: Annotated[PgConnectionConfig, Setting("The source.")]
    store_pg_connection: Annotated[
        PgConnectionConfig | None,
        Setting(
            "The database for the state, if not in the source: for a standby, or a source that must not be written to."
        ),
    ] = None
    batch: Annotated[BatchConfig, Setting("How changes are collected into batches.")] = field(
        default_factory=BatchConfig
    )
    table_error_retry_delay_ms: Annotated[
        int, Setting("The first wait before a failed table is retried; it doubles, with jitter.", above=0)
    ] = 10_000
    table_error_retry_max_attempts: Annotated[
        int,
        Setting(
            "Attempts without progress after which a table is no longer retried and waits for `headwater rollback`.",
            above=0,
        ),
    ] = 5
    destination_deadline_ms: Annotated[
        int | None,
        Setting(
            "How long the destination may take to complete one call, a whole copy included. After that it is unknown what was "
            "written: a copy's table waits for `headwater rollback`, a batch stops the pipeline. Without it: no limit.",
            above=0,
        ),
    ] = None
    max_table_sync_workers: Annotated[
        int,
        Setting(
            "Large tables, or groups of small ones, that are copied at the same time; each needs a replication slot.",
            above=0,
        ),
    ] = 4
    max_copy_connections_per_table: Annotated[
        int,
        Setting(
            "Connections that read one table, or one group of small ones, at once. Fewer if Spark has fewer cores: while other "
            "tables are followed, a copy leaves one core to their changes.",
            above=0,
        ),
    ] = 4
    memory_refresh_interval_ms: Annotated[int, Setting("How often the use of memory is measured.", above=0)] = 100
    memory_backpressure: Annotated[
        MemoryBackpressureConfig | None,
        Setting(
            "When reading pauses to save memory, until what was read is written; large transactions are written to disk "
            "meanwhile. `false` turns it off."
        ),
    ] = field(default_factory=MemoryBackpressureConfig)
    table_sync_copy: Annotated[TableSyncCopyConfig, Setting("Which tables are copied.")] = field(
        default_factory=TableSyncCopyConfig
    )
    in_doubt: Annotated[
        InDoubt,
        Setting(
            "What happens when the catalog of the source changed in a way that may have changed rows without a change in the "
            "stream: `copy` copies the table again."
        ),
    ] = InDoubt.COPY
    show_values_in_errors: Annotated[
        bool,
        Setting(
            "Whether error messages of Postgres, Spark and Arrow may contain the values of rows that they quote, in the log, "
            "in errors and in the store. For the whole process."
        ),
    ] = False
    invalidated_slot_behavior: Annotated[
        InvalidatedSlotBehavior,
        Setting(
            "When the slot can no longer serve changes: stop with an error, or create a new slot and copy all tables again."
        ),
    ] = InvalidatedSlotBehavior.ERROR
    failover_slot: Annotated[
        bool,
        Setting(
            "Whether standbys synchronize the slot, so that the pipeline continues after a failover (Postgres 17 and later). "
            "The standby needs `sync_replication_slots`, `hot_standby_feedback` and `primary_slot_name`."
        ),
    ] = False
    heartbeat_interval_ms: Annotated[
        int | None,
        Setting(
            "How often a small message is written to the source's WAL, for servers whose keepalives alone do not advance the "
            "slot. Without it: never. Not possible on a standby.",
            at_least=100,
        ),
    ] = None
    run_source_migrations: Annotated[
        bool,
        Setting("Whether DDL capture may be installed in the source. Has no effect yet."),
    ] = True

    @property
    def store_connection(self) -> PgConnectionConfig:
        return self.store_pg_connection or self.pg_connection
