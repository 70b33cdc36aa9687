"""The store that the settings name. Imports no pyspark, so that commands which only look at state start at once."""

from __future__ import annotations

from headwater.config import Settings, StoreType
from headwater.contracts.stores import PipelineStore
from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore


def build_store(settings: Settings) -> PipelineStore:
    return MemoryStore() if settings.store.type is StoreType.MEMORY else postgres_store(settings)


def postgres_store(settings: Settings) -> PostgresStore:
    return PostgresStore(settings.pipeline.store_connection.connect_settings("headwater store"), settings.pipeline.id)
