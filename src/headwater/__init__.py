"""Headwater keeps lakehouse tables in step with Postgres. Importing this package does not import pyspark.

The pipeline is `headwater.engine.pipeline.Pipeline`; `headwater.assembly.build` makes one from settings.
"""

from headwater.config import (
    BatchConfig,
    InvalidatedSlotBehavior,
    MemoryBackpressureConfig,
    PgConnectionConfig,
    PipelineConfig,
    Secret,
    Settings,
    TableSyncCopyConfig,
    TcpKeepaliveConfig,
    TlsConfig,
    load_settings,
)
from headwater.errors import HeadwaterError, Retry
from headwater.lsn import CommitLsn, EndLsn
from headwater.source.exported_snapshot import exported_snapshot

__all__ = [
    "BatchConfig",
    "CommitLsn",
    "EndLsn",
    "HeadwaterError",
    "InvalidatedSlotBehavior",
    "MemoryBackpressureConfig",
    "PgConnectionConfig",
    "PipelineConfig",
    "Retry",
    "Secret",
    "Settings",
    "TableSyncCopyConfig",
    "TcpKeepaliveConfig",
    "TlsConfig",
    "exported_snapshot",
    "load_settings",
]
