"""One Spark session for the integration tests of a process, with an embedded lake of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from headwater.config import DestinationConfig, SparkConfig
from headwater.destinations.iceberg.warehouse import prepare_warehouse, spark_catalog
from headwater.engine.supervise import publication_watch, round
from headwater.spark.session import build_session
from tests.conftest import Database
from tests.integration.blocking_destination import ObservedApplyWorker, create_tables
from tests.integration.lake_destination import Lake


@pytest.fixture(scope="session")
def lake_settings(tmp_path_factory: pytest.TempPathFactory) -> DestinationConfig:
    settings = DestinationConfig(warehouse=str(tmp_path_factory.mktemp("lake")))
    prepare_warehouse(settings)
    return settings


@pytest.fixture(scope="session")
def spark(lake_settings: DestinationConfig) -> Iterator[SparkSession]:
    session = build_session(SparkConfig(master="local[2]", driver_memory="1g"), spark_catalog(lake_settings))
    yield session
    session.stop()


@pytest.fixture
def lake(spark: SparkSession, lake_settings: DestinationConfig) -> Iterator[Lake]:
    made = Lake(spark, lake_settings)
    yield made
    made.destination.shutdown()


@pytest.fixture(autouse=True)
def look_at_the_catalog_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines in the process of the test notice what a test changes in the source after 0.1 s, not 2 s."""
    monkeypatch.setattr(publication_watch, "LOOK_SECONDS", 0.1)


@pytest.fixture
def observed_apply_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines run an `ObservedApplyWorker`, which is asked what it has read."""
    monkeypatch.setattr(round, "ApplyWorker", ObservedApplyWorker)


@pytest.fixture
def first(database: Database, observed_apply_worker: None) -> None:
    """A table that is followed before others come."""
    create_tables(database)
