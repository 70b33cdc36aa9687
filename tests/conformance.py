"""What Headwater promises beside the tests that keep it, as Markdown. docs/conformance.md is it; a test says so.

`python -m tests.conformance docs/conformance.md` writes it again. A test says what it keeps by the markers `promise` and
`invariant`, its own or those of its class or module. They are read from the source: no test is imported, and nothing is started.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.promises import EXPECTED, NO_TEST, NOT_SHOWN, SENTENCES

ROOT = Path(__file__).parents[1]
_SUITES = ("src/headwater/testing/store_runs.py", "src/headwater/testing/store_suite.py")
"""Suites that are shipped, and run here over every implementation. The files that run them mark their tests."""

_INTRODUCTION = """\
# What is promised, and the test that keeps it

Made by `python -m tests.conformance docs/conformance.md` from the sentences of `tests/promises.py` and the markers of the tests;
a test fails when it is stale. What no test shows yet says so. The rule and the reason of each invariant, and where the code keeps
it: [invariants](invariants.md).

`pytest -k` finds the tests of a promise by its sentence, with `_` for whatever is no letter or digit:
`pytest tests/integration -k a_second_start_is_refused`."""


@dataclass(frozen=True, slots=True)
class Test:
    file: str
    name: str
    invariants: frozenset[int]
    promises: frozenset[str]

    @property
    def reference(self) -> str:
        return f"{self.file}::{self.name}"


class Incomplete(Exception):
    """A marker names a sentence or an invariant that is in no list, or a sentence of the list has no test."""


@cache
def collect() -> tuple[Test, ...]:
    """Every test of the tree, in order of file and line."""
    files = [*sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")), *_SUITES]
    trees = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in files}
    outside = [marked for tree in trees.values() for marked in _marked_from_outside(tree)]
    return tuple(
        test for file, tree in trees.items() for test in _tests(file, tree, outside if file in _SUITES else [], [])
    )


def _tests(
    file: str, room: ast.Module | ast.ClassDef, outside: list[tuple[str, ast.expr]], around: list[ast.expr]
) -> Iterator[Test]:
    """The tests of a module or class, each with the markers `around` it and those given to it from outside."""
    around = around + _pytestmark(room)
    for node in room.body:
        if isinstance(node, ast.ClassDef):
            yield from _tests(file, node, outside, around + node.decorator_list)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [*around, *node.decorator_list, *(mark for name, mark in outside if name == node.name)]
            numbers = re.findall(r"^test_invariant_(\d+)_", node.name)
            invariants = {*map(int, numbers), *_arguments(marks, "invariant")}
            yield Test(file, node.name, frozenset(invariants), frozenset(_arguments(marks, "promise")))


def _pytestmark(room: ast.Module | ast.ClassDef) -> list[ast.expr]:
    assigned = [
        node.value
        for node in room.body
        if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    return [mark for value in assigned for mark in (value.elts if isinstance(value, ast.List) else [value])]


def _marked_from_outside(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """`pytest.mark.promise("...")(StoreSuite.test_x)`: the test's name and the marker."""
    for node in module.body:
        match node:
            case ast.Expr(ast.Call(ast.Call() as mark, [ast.Attribute(attr=name)])):
                yield name, mark


def _arguments(marks: list[ast.expr], name: str) -> Iterator[Any]:
    for mark in marks:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == f"pytest.mark.{name}":
            yield from (ast.literal_eval(argument) for argument in mark.args)


def invariants() -> dict[int, str]:
    """The titles of docs/invariants.md by number."""
    text = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    return {int(number): title for number, title in re.findall(r"^## (\d+)\. (.+)$", text, re.M)}


def page(tests: Sequence[Test]) -> str:
    """The whole document."""
    _check(tests)
    lines = [_INTRODUCTION, "", "## Invariants", ""]
    for number, title in invariants().items():
        kept_by = [test for test in tests if number in test.invariants]
        lines += _entry(f"{number}. **{title}**", "    ", kept_by, NOT_SHOWN.get(title))
    for heading, sentences in EXPECTED.items():
        lines += ["", f"## {heading}", ""]
        for sentence in sentences:
            kept_by = [test for test in tests if sentence in test.promises]
            lines += _entry(f"- **{sentence}**", "  ", kept_by, NOT_SHOWN.get(sentence))
    return "\n".join([*lines, ""])


def _check(tests: Sequence[Test]) -> None:
    titles = invariants()
    for test in tests:
        if not test.promises <= SENTENCES:
            raise Incomplete(f"{test.reference} is marked with a promise that tests/promises.py does not list")
        if not test.invariants <= set(titles):
            raise Incomplete(f"{test.reference} is marked with an invariant that docs/invariants.md does not have")
    shown = {sentence for test in tests for sentence in test.promises}
    shown |= {titles[number] for test in tests for number in test.invariants}
    for sentence in (SENTENCES | set(titles.values())) - shown:
        if NOT_SHOWN.get(sentence) != NO_TEST:
            raise Incomplete(f"no test is marked as showing: {sentence}")
    for sentence, what in NOT_SHOWN.items():
        if sentence not in SENTENCES | set(titles.values()):
            raise Incomplete(f"tests/promises.py says what is not shown of a sentence that is in no list: {sentence}")
        if what == NO_TEST and sentence in shown:
            raise Incomplete(f"tests/promises.py says that no test shows what one does: {sentence}")


def _entry(heading: str, indent: str, tests: list[Test], not_shown: str | None) -> Iterator[str]:
    yield heading if tests else f"{heading}: not shown yet"
    for test in tests:
        yield f"{indent}- [{_sentence(test.name)}](../{test.file})"
    if tests and not_shown:
        yield f"{indent}- not shown yet: {not_shown}"


def _sentence(name: str) -> str:
    return re.sub(r"^test_(invariant_\d+_)?", "", name).replace("_", " ")


def main() -> None:
    Path(sys.argv[1]).write_text(page(collect()), encoding="utf-8")


if __name__ == "__main__":
    main()
