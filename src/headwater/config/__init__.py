"""Typed settings, and how they are read from a TOML file. Knows neither Spark nor a destination."""

from headwater.config.connection import PgConnectionConfig
from headwater.config.load import load_settings
from headwater.config.pipeline import (
    BatchConfig,
    InvalidatedSlotBehavior,
    MemoryBackpressureConfig,
    PipelineConfig,
    TableSyncCopyConfig,
    TableSyncCopyMode,
)
from headwater.config.settings import (
    CatalogConfig,
    CatalogType,
    DestinationConfig,
    DestinationMode,
    DestinationType,
    Settings,
    SparkConfig,
    StoreConfig,
    StoreType,
)
from headwater.secret import Secret
from headwater.wire.settings import TcpKeepaliveConfig
from headwater.wire.tls_config import TlsConfig, TlsMode

__all__ = [
    "BatchConfig",
    "CatalogConfig",
    "CatalogType",
    "DestinationConfig",
    "DestinationMode",
    "DestinationType",
    "InvalidatedSlotBehavior",
    "MemoryBackpressureConfig",
    "PgConnectionConfig",
    "PipelineConfig",
    "Secret",
    "Settings",
    "SparkConfig",
    "StoreConfig",
    "StoreType",
    "TableSyncCopyConfig",
    "TableSyncCopyMode",
    "TcpKeepaliveConfig",
    "TlsConfig",
    "TlsMode",
    "load_settings",
]
