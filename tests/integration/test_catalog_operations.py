"""Each operation that the stream does not tell, or tells in part: its tables end equal, and are copied again for a reason.

All operations of a publication share one pipeline, a table or a few for each; `-k` runs only what it selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

from headwater.testing.binaries import DEFAULT_VERSION
from headwater.testing.postgres import PostgresServer
from tests.conftest import Database, fresh_database
from tests.fuzz import masked_operations, membership_operations, table_operations
from tests.fuzz.catalog_run import model_run
from tests.fuzz.operation import Operation, Stage, setup
from tests.fuzz.verdict import Moment, Problems, perform

OPERATIONS = (*table_operations.OPERATIONS, *membership_operations.OPERATIONS, *masked_operations.OPERATIONS)
CASES = [(operation, stage) for operation in OPERATIONS for stage in operation.stages]

T = TypeVar("T")
Judge = Callable[[Stage, Moment], Problems]


def case_name(case: tuple[Operation, Stage]) -> str:
    return f"{case[0].name}-{case[1].name.lower()}"


def moment_name(moment: Moment) -> str:
    return moment.name.lower()


@pytest.fixture(scope="module")
def judge(request: pytest.FixtureRequest, pg_servers: Callable[[int], PostgresServer]) -> Judge:
    """What is wrong after all selected operations of a publication: found once for all tests of it."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = [spec.params for spec in specs if spec is not None]
    selected = {params["case"][0].name for params in wanted if "case" in params}
    found: dict[tuple[Stage, Moment], Problems | Exception] = {}

    def verdict(stage: Stage, moment: Moment) -> Problems:
        if (stage, moment) not in found:
            operations = [operation for operation, at in CASES if at is stage and operation.name in selected]
            try:
                found[stage, moment] = _perform(pg_servers(DEFAULT_VERSION), operations, stage, moment)
            except Exception as error:
                found[stage, moment] = error
        problems = found[stage, moment]
        if isinstance(problems, Exception):
            raise problems
        return problems

    return verdict


def _perform(server: PostgresServer, operations: list[Operation], stage: Stage, moment: Moment) -> Problems:
    with fresh_database(server) as database, model_run(database, setup(stage, operations)) as run:
        return perform(run, operations, moment)


def one_worker_each(values: Iterable[T], name: Callable[[T], str], group: Callable[[T], str]) -> list[Any]:
    """As parameters of a test. Those of a group run in one worker of pytest-xdist: another would begin a run of its own."""
    return [pytest.param(value, id=name(value), marks=pytest.mark.xdist_group(group(value))) for value in values]


@pytest.mark.invariant(17)
@pytest.mark.parametrize("moment", one_worker_each(Moment, moment_name, moment_name))
@pytest.mark.parametrize("case", one_worker_each(CASES, case_name, lambda case: case[1].name))
def test_a_table_is_equal_after_an_operation_on_it_and_copied_again_only_for_a_reason(
    judge: Judge, case: tuple[Operation, Stage], moment: Moment
) -> None:
    operation, stage = case
    problems = judge(stage, moment)[operation.name]
    assert not problems, "\n".join(problems)


@pytest.mark.invariant(17)
@pytest.mark.parametrize("moment", Moment, ids=moment_name)
@pytest.mark.parametrize("operation", membership_operations.PUBLICATIONS, ids=lambda operation: operation.name)
def test_all_tables_are_equal_after_an_operation_on_the_publication(
    database: Database, operation: Operation, moment: Moment
) -> None:
    with model_run(database, setup(Stage.LISTED, [operation])) as run:
        (problems,) = perform(run, [operation], moment).values()
    assert not problems, "\n".join(problems)
