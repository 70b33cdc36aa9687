"""A seed under the oracle: rounds of random statements, each ended by a barrier and a comparison of every table."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum

from tests.fuzz.catalog_run import CatalogRun
from tests.fuzz.generator import Generator


class Round(Enum):
    WITHIN_ONE_LOOK = "within one look"
    LOOKED_AT = "looked at as it happens"
    WHILE_STOPPED = "while stopped"


@dataclass(slots=True)
class Fuzzed:
    """What a seed did, and what was wrong after the last of its rounds."""

    seed: int
    script: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}", *self.problems, "script:", *(f"  {line}" for line in self.script)])


def fuzz(run: CatalogRun, generator: Generator, seed: int) -> Fuzzed:
    """Stops at the first round that leaves a table wrong."""
    done = Fuzzed(seed)
    run.start()
    run.wait_settled()
    kinds = list(Round)
    try:
        for number in range(generator.rounds):
            done.problems = _round(run, generator, done, kinds[(seed + number) % len(kinds)])
            if done.problems:
                break
        run.stop()
    except Exception as error:
        error.add_note(str(done))
        raise
    return done


def _round(run: CatalogRun, generator: Generator, done: Fuzzed, kind: Round) -> list[str]:
    done.script.append(f"-- {kind.value}")
    copied, said = len(run.copies), len(run.log.lines)
    if kind is Round.WHILE_STOPPED:
        run.stop()
    with nullcontext() if kind is Round.LOOKED_AT else run.looks.held():
        _statements(run, generator, done)
    if kind is Round.WHILE_STOPPED:
        run.start()
    run.barrier()
    return _problems(run, copied, said)


def _statements(run: CatalogRun, generator: Generator, done: Fuzzed) -> None:
    for _ in range(generator.statements):
        for statement in generator.next_statements():
            if run.try_to_execute(statement):
                done.script.append(f"{statement};")


def _problems(run: CatalogRun, copied: int, said: int) -> list[str]:
    refused = {table for table, state in run.failures().items() if "alter" in state.solution.lower()}
    problems = [difference for table, difference in run.differences().items() if table not in refused]
    counts = Counter(copy.table for copy in run.copies)
    for copy in run.copies[copied:]:
        # A table has the names it was ever copied under, and the reason may name any of them.
        names = "|".join(rf"\b{other.name.name}\b" for other in run.copies if other.table == copy.table)
        if counts[copy.table] > 1 and not run.log.reasons(names, said):
            problems.append(f"{copy.name} was copied again without a reason in the log")
    return problems
