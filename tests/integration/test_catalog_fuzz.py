"""The long run of the fuzzer, against a real lake: part of `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.conftest import Database
from tests.fuzz.fuzzer import fuzz
from tests.fuzz.generator import Generator
from tests.integration.catalog_lake import lake_run
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS


@pytest.mark.slow
@pytest.mark.invariant(17)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 120))
def test_random_catalog_statements_leave_the_lake_equal(
    database: Database, spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    generator = Generator(seed, database)
    with lake_run(database, spark, tmp_path, generator.setup()) as run:
        generator.rounds, generator.statements = 9, 25
        done = fuzz(run, generator, seed)
    assert not done.problems, str(done)
