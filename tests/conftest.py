"""What all tests share: a Postgres server of each version a test process, and a fresh database a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import psycopg
import pytest
from psycopg import sql

from headwater.testing.binaries import DEFAULT_VERSION
from headwater.testing.postgres import PostgresServer
from headwater.wire.settings import ConnectSettings
from tests.process_environment import prepare_environment
from tests.promises import keyword

prepare_environment()

LONGEST = ("tests/crash/", "tests/mutations/", "tests/soak/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `pytest -k` find the tests of a promise by its sentence, with `_` for whatever is no letter or digit.

    The longest tests come first: at the end one of them would leave all cores but one idle.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    for item in items:
        words = {keyword(sentence) for mark in item.iter_markers("promise") for sentence in mark.args}
        words |= {f"invariant_{number}" for mark in item.iter_markers("invariant") for number in mark.args}
        item.extra_keyword_matches.update(words)


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


@contextmanager
def fresh_database(server: PostgresServer) -> Iterator[Database]:
    """Of a new name. It is dropped at the end, with its slots and whoever is connected."""
    name = server.create_database()
    try:
        with server.connect(name) as connection:
            yield Database(server, name, connection)
    finally:
        server.drop_database(name)


VERSIONS = (15, 16, 17, 18)
"""What tests with the marker `versions` are run against, unless it names others."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("versions")
    if marker is not None and "pg_version" in metafunc.fixturenames:
        versions = marker.args or VERSIONS
        metafunc.parametrize("pg_version", versions, ids=[f"pg{version}" for version in versions])


@pytest.fixture
def pg_version() -> int:
    """The major version of this test's server; those marked `versions` run once for each of VERSIONS."""
    return DEFAULT_VERSION


@pytest.fixture(scope="session")
def pg_servers() -> Iterator[Callable[[int], PostgresServer]]:
    """A server of a version: started when first asked for, then the same for the whole test process."""
    with ExitStack() as stack:
        yield cache(lambda version: stack.enter_context(PostgresServer.start(version=version)))


@pytest.fixture
def pg_server(pg_servers: Callable[[int], PostgresServer], pg_version: int) -> PostgresServer:
    """Shared by all tests of the process: don't stop it, don't change its settings. Start your own for that."""
    return pg_servers(pg_version)


@pytest.fixture
def database(pg_server: PostgresServer) -> Iterator[Database]:
    with fresh_database(pg_server) as made:
        yield made


@pytest.fixture
def pg(database: Database) -> ConnectSettings:
    """Only how to reach the fresh database, for tests that bring their own connections."""
    return database.settings
