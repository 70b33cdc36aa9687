"""What all tests share: a Postgres server and a Spark session a test process, a fresh database a test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from headwater.testing.postgres import PostgresServer
from headwater.wire.settings import ConnectSettings
from tests.conformance import sentences

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test answers to the sentences of the promises it keeps, too."""
    promised = sentences()
    for item in items:
        item.extra_keyword_matches.update(promised.get(item.nodeid.partition("[")[0], ()))


@dataclass(frozen=True, slots=True)
class Database:
    """A database of one test's own, with a session in it. It and its replication slots are dropped afterwards."""

    server: PostgresServer
    name: str
    connection: psycopg.Connection[tuple[Any, ...]]

    @property
    def settings(self) -> ConnectSettings:
        return self.server.settings(self.name)

    def connect(self, **arguments: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """A further session, in autocommit; the caller closes it."""
        return self.server.connect(self.name, **arguments)

    def execute(
        self, statement: str | sql.Composable, parameters: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run one statement, or several without parameters; the rows of the last one, if it has any."""
        cursor = self.connection.execute(statement, parameters)  # type: ignore[arg-type]
        while cursor.nextset():
            pass
        return cursor.fetchall() if cursor.description is not None else []

    def value(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> Any:
        """The one value of the one row."""
        ((value,),) = self.execute(statement, parameters)
        return value


@pytest.fixture(scope="session")
def pg_server() -> Iterator[PostgresServer]:
    """One server for the whole test process: don't stop it, don't change its settings. Start your own for that."""
    with PostgresServer.start() as server:
        yield server


@pytest.fixture
def database(pg_server: PostgresServer) -> Iterator[Database]:
    name = pg_server.create_database()
    try:
        with pg_server.connect(name) as connection:
            yield Database(pg_server, name, connection)
    finally:
        pg_server.drop_database(name)


@pytest.fixture
def pg(database: Database) -> ConnectSettings:
    """Only how to reach the fresh database, for tests that bring their own connections."""
    return database.settings


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for the whole test process, with a warehouse of its own: make a namespace a test."""
    # Imported only here: most tests need no Spark, and it takes a second.
    from headwater.spark.session import SparkSettings, build_session

    lake = tmp_path_factory.mktemp("lake")
    catalog = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "jdbc",
        "spark.sql.catalog.lake.uri": f"jdbc:sqlite:file:{lake}/catalog.db",
        "spark.sql.catalog.lake.warehouse": str(lake),
        "spark.sql.catalog.lake.jdbc.schema-version": "V1",
        "spark.sql.catalog.lake.cache-enabled": "false",
    }
    session = build_session(SparkSettings(master="local[2]"), catalog)
    yield session
    session.stop()
