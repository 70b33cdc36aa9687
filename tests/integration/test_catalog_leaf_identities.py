"""Root identity x leaf identity under publish_via_partition_root: equal, or refused with what to alter; never wrong and ready."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headwater.testing.binaries import DEFAULT_VERSION
from headwater.testing.postgres import PostgresServer
from tests.conftest import Database, fresh_database
from tests.fuzz.catalog_run import CatalogRun, model_run
from tests.fuzz.leaf_identities import CASES, judge, setup, table_of
from tests.integration.catalog_lake import lake_run
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS


@pytest.fixture(scope="module")
def server(pg_servers: Callable[[int], PostgresServer]) -> PostgresServer:
    return pg_servers(DEFAULT_VERSION)


@pytest.fixture(scope="module")
def in_the_model(server: PostgresServer) -> dict[str, list[str]]:
    return _judged(server, lambda database: model_run(database, setup()))


@pytest.fixture(scope="module")
def in_the_lake(
    server: PostgresServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    directory: Path = tmp_path_factory.mktemp("leaf_identities")
    return _judged(server, lambda database: lake_run(database, spark, directory, setup()))


def _judged(
    server: PostgresServer, open: Callable[[Database], AbstractContextManager[CatalogRun]]
) -> dict[str, list[str]]:
    with fresh_database(server) as database, open(database) as run:
        return judge(run)


@pytest.mark.invariant(13)
@pytest.mark.xdist_group("in_the_model")
@pytest.mark.parametrize(("root", "leaf"), CASES)
def test_the_engine_tells_the_changes_of_leaves_with_any_identity_or_refuses_the_table(
    in_the_model: dict[str, list[str]], root: str, leaf: str
) -> None:
    assert not in_the_model[table_of(root, leaf)]


@pytest.mark.invariant(13)
@pytest.mark.xdist_group("in_the_lake")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("root", "leaf"), CASES)
def test_a_partitioned_table_is_equal_in_the_lake_or_refused_whatever_identities_its_leaves_have(
    in_the_lake: dict[str, list[str]], root: str, leaf: str
) -> None:
    assert not in_the_lake[table_of(root, leaf)]
