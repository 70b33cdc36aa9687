"""A pipeline under a script of catalog statements, and the oracle that judges it: source against mirror at a position.

The mirror is a model in memory (`ModelRun`, tenths of a second) or a real lake (`LakeRun`, in tests/integration). The
barrier waits for a position, never for a time: every difference in the catalog that was made before it has been judged, the
stream is past it, and every table that is published now is ready or has failed for good.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
import pyarrow as pa

from headwater.errors import Retry
from headwater.schema.table import TableName
from headwater.source.publication import OWN_NAMESPACE
from headwater.source.slots import apply_slot_name
from headwater.states import Phase, TableState
from headwater.store.postgres import PostgresStore
from headwater.testing.compare import TableComparison, compare_rows, confirmed_position
from headwater.testing.source_rows import describe, read_source
from tests.conftest import Database
from tests.fuzz.looks import Looks
from tests.fuzz.model import Copy, ModelDestination
from tests.integration.running_pipeline import RunningPipeline, config, running_pipeline

PUBLICATION = "shop"

_PUBLISHED = """
select p.schemaname, p.tablename, p.attnames, p.rowfilter from pg_publication_tables p
where p.pubname = %s and p.schemaname <> %s
"""


@dataclass(frozen=True, slots=True)
class Published:
    """What the mirror of a table has to show."""

    name: TableName
    columns: tuple[str, ...]
    row_filter: str | None


class Told(logging.Handler):
    """Every line that Headwater logs, from the test's first moment to its last."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))

    def reasons(self, names: str, since: int = 0) -> list[str]:
        """Lines that say why a table is copied: warnings that name it (a pattern) and the copy."""
        pattern = re.compile(names)
        return [
            line
            for level, line in self.lines[since:]
            if level >= logging.WARNING and "cop" in line.lower() and pattern.search(line)
        ]


@contextmanager
def told() -> Iterator[Told]:
    handler, logger = Told(), logging.getLogger("headwater")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class CatalogRun(ABC):
    """Statements go through `execute`; `start` and `stop` are runs of one pipeline over one store and one mirror."""

    def __init__(self, database: Database, looks: Looks, log: Told) -> None:
        self.database = database
        self.looks = looks
        self.log = log
        self._stack = ExitStack()
        self._watched: RunningPipeline | None = None
        self._store: PostgresStore | None = None
        # A statement that waits for ever would hide the table that holds it up.
        database.execute("set lock_timeout = '20s'")

    # Runs of the pipeline

    def start(self) -> None:
        self._store = PostgresStore(self.database.settings, 1)
        self._watched = self._stack.enter_context(self._open(self._store))

    def stop(self) -> None:
        pipeline = self.running
        self._watched = None
        pipeline.stop()
        self._stack.close()

    def close(self) -> None:
        self._watched = None
        self._stack.close()

    @property
    def running(self) -> RunningPipeline:
        assert self._watched is not None, "the pipeline is not started"
        return self._watched

    # Statements

    def execute(self, statement: str) -> None:
        try:
            self.database.execute(statement)
        except psycopg.Error as error:
            raise AssertionError(f"the source refused {statement!r}: {error}") from error

    def try_to_execute(self, statement: str) -> bool:
        """Whether the source took it. It is undone as a whole if not."""
        try:
            self.database.execute(statement)
        except psycopg.OperationalError:
            if self.database.connection.closed:
                raise
            self.database.connection.execute("rollback")
            return False
        except psycopg.Error:
            self.database.connection.execute("rollback")
            return False
        return True

    # The barrier

    def barrier(self) -> None:
        """Everything that was done to the source before this call is in the mirror after it, or a table has failed."""
        # A look reads the facts first and its position last, so one that was under way may show a position past the last
        # statement and not its effect. Any look that ends from here on began after all statements.
        self.see()
        position = int(self.database.value("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))
        # On disk with certainty, and past a page's header: an idle server would stop a few bytes before the position.
        self.database.execute("select pg_logical_emit_message(true, 'barrier', '')")
        self._wait_judged(position)
        slot, connection = apply_slot_name(self.running.pipeline.config.id), self.database.connection
        self.running.wait_for(lambda: confirmed_position(connection, slot) >= position)
        self.wait_settled()

    def wait_settled(self) -> None:
        """Every table that is published now is ready, or has failed for good."""
        self.running.wait_for(self._settled)

    def _wait_judged(self, position: int) -> None:
        progress = self.running.pipeline.progress
        if getattr(progress.snapshot(), "judged", None) is not None:
            self._wait_looking(lambda: getattr(progress.snapshot(), "judged", 0) >= position)

    def see(self) -> None:
        """Wait until the pipeline has looked at the catalog as it is now."""
        # One look may be under way; two that begin after the last statement see all of it.
        enough = self.looks.count + 3
        self._wait_looking(lambda: self.looks.count >= enough)

    def _wait_looking(self, condition: Callable[[], bool]) -> None:
        def reached() -> bool:
            self.looks.hurry()
            return condition()

        self.running.wait_for(reached)

    def _settled(self) -> bool:
        states = self.running.states()
        if states.keys() != {str(table.name) for table in self.published()}:
            return False
        errored = [state for state in self._states().values() if state.phase is Phase.ERRORED]
        return set(states.values()) <= {"ready", "errored"} and not any(_comes_back(state) for state in errored)

    def _states(self) -> Mapping[Any, TableState]:
        assert self._store is not None
        return self._store.get_table_states()

    def failures(self) -> dict[TableName, TableState]:
        """Tables that have failed for good, with reason and solution."""
        found = {}
        for table, state in self._states().items():
            row = self.database.execute(
                "select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = %s",
                [table],
            )
            if state.phase is Phase.ERRORED and row:
                found[TableName(*row[0])] = state
        return found

    # The oracle

    def published(self) -> list[Published]:
        rows = self.database.execute(_PUBLISHED, [PUBLICATION, OWN_NAMESPACE])
        return [
            Published(TableName(space, name), tuple(columns), row_filter) for space, name, columns, row_filter in rows
        ]

    def differences(self) -> dict[TableName, str]:
        """Every published table that is not equal to its mirror, or has failed, and in what."""
        failures = self.failures()
        found = {}
        for table in self.published():
            if table.name in failures:
                state = failures[table.name]
                found[table.name] = f"{table.name} has failed: {state.reason}; {state.solution}"
                continue
            try:
                comparison = self.compare(table)
            except (LookupError, OSError, pa.ArrowException) as error:
                found[table.name] = f"{table.name} cannot be compared: {error}"
                continue
            if not comparison.equal:
                found[table.name] = str(comparison)
        return found

    def refused(self) -> Sequence[tuple[TableName, str]]:
        """Changes that the destination was given and that cannot be, where it tells."""
        return ()

    @property
    @abstractmethod
    def copies(self) -> Sequence[Copy]:
        """Every copy that was made, over all runs."""

    @abstractmethod
    def compare(self, table: Published) -> TableComparison: ...

    @abstractmethod
    def _open(self, store: PostgresStore) -> AbstractContextManager[RunningPipeline]: ...


def _comes_back(state: TableState) -> bool:
    return state.retry_policy is not None and state.retry_policy.kind is Retry.TIMED


class ModelRun(CatalogRun):
    """Into the model: no Spark, no lake."""

    def __init__(self, database: Database, looks: Looks, log: Told) -> None:
        super().__init__(database, looks, log)
        self.model = ModelDestination()

    @property
    def copies(self) -> Sequence[Copy]:
        return self.model.copies

    def refused(self) -> Sequence[tuple[TableName, str]]:
        return self.model.refused

    def compare(self, table: Published) -> TableComparison:
        schema = describe(self.database.connection, table.name, table.columns)
        source = read_source(self.database.connection, schema, table.row_filter)
        return compare_rows(schema, source, self.model.read(schema))

    def _open(self, store: PostgresStore) -> AbstractContextManager[RunningPipeline]:
        return running_pipeline(self.database, config(self.database), store, self.model)


Run = TypeVar("Run", bound=CatalogRun)


@contextmanager
def prepared(run: Callable[[Looks, Told], Run], statements: Sequence[str] = ()) -> Iterator[Run]:
    """A run that is not started yet; what the source has before is made by `statements`."""
    looks = Looks()
    try:
        with told() as log:
            made = run(looks, log)
            for statement in statements:
                made.execute(statement)
            try:
                yield made
            finally:
                made.close()
    finally:
        looks.undo()


def model_run(database: Database, statements: Sequence[str] = ()) -> AbstractContextManager[ModelRun]:
    return prepared(lambda looks, log: ModelRun(database, looks, log), statements)
