"""Operations carried out under a running pipeline or across a stop, and what is wrong afterwards, by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from itertools import zip_longest

from tests.fuzz.catalog_run import CatalogRun
from tests.fuzz.operation import Copies, Operation


class Moment(Enum):
    WITHIN_ONE_LOOK = "all steps between two looks of a running pipeline"
    LOOKED_AT = "a look of the running pipeline after each step"
    WHILE_STOPPED = "all steps between two runs"


Problems = dict[str, list[str]]


def perform(run: CatalogRun, operations: Sequence[Operation], moment: Moment) -> Problems:
    """Start the pipeline, carry all operations out, compare; change rows, compare again. Stops the pipeline."""
    run.start()
    run.wait_settled()
    problems: Problems = {operation.name: [] for operation in operations}
    _compare(run, operations, problems, "before any step")
    copied, said = len(run.copies), len(run.log.lines)
    _carry_out(run, operations, moment)
    run.barrier()
    _compare(run, operations, problems, "after the steps")
    for operation in operations:
        for statement in operation.then:
            run.execute(operation.sql(statement))
    run.barrier()
    _compare(run, operations, problems, "after further changes of rows")
    for operation in operations:
        problems[operation.name].extend(_copies(run, operation, copied, said))
    run.stop()
    return problems


def _carry_out(run: CatalogRun, operations: Sequence[Operation], moment: Moment) -> None:
    if moment is Moment.LOOKED_AT:
        for statements in zip_longest(*([(o, step) for step in o.steps] for o in operations)):
            for pair in statements:
                if pair is not None:
                    run.execute(pair[0].sql(pair[1]))
            run.see()
        return
    if moment is Moment.WHILE_STOPPED:
        run.stop()
    with run.looks.held():
        for operation in operations:
            for step in operation.steps:
                run.execute(operation.sql(step))
    if moment is Moment.WHILE_STOPPED:
        run.start()


def _compare(run: CatalogRun, operations: Sequence[Operation], problems: Problems, when: str) -> None:
    for table, difference in run.differences().items():
        for operation in operations:
            if operation.owns(table):
                problems[operation.name].append(f"{when}: {difference}")


def _copies(run: CatalogRun, operation: Operation, since: int, said: int) -> list[str]:
    made = [copy for copy in run.copies[since:] if operation.owns(copy.name)]
    counts = Counter(copy.table for copy in run.copies)
    again = {copy for copy in made if counts[copy.table] > 1}
    found = []
    if again and operation.copies is Copies.NONE:
        found.append(
            f"copied again: {sorted({str(copy.name) for copy in again})}, {run.log.reasons(operation.pattern, said)}"
        )
    if again and not run.log.reasons(operation.pattern, said):
        found.append(f"copied again without a reason in the log: {sorted({str(copy.name) for copy in again})}")
    if not made and operation.copies is Copies.SOME:
        found.append("nothing was copied again")
    return found
