"""The store contract over every store we ship."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from headwater.testing.store_suite import MakeStore, StoreSuite


class TestMemoryStore(StoreSuite):
    persistent = False

    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda pipeline_id: MemoryStore()


class TestPostgresStore(StoreSuite):
    @pytest.fixture
    def make_store(self, database: Any) -> MakeStore:
        return lambda pipeline_id: PostgresStore(database.settings, pipeline_id)
