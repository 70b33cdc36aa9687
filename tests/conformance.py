"""What Headwater promises beside the tests that keep it, as Markdown. docs/conformance.md is it; a test says so.

`python -m tests.conformance docs/conformance.md` writes it again. The tests are found by reading their source: nothing is run.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMISES = ROOT / "tests" / "promises.toml"
_ELSEWHERE = ("src/headwater/testing/store_runs.py", "src/headwater/testing/store_suite.py")
"""Suites that are shipped, and run here over every implementation."""

_INTRODUCTION = """\
# What is promised, and the test that keeps it

Made from the tests and `tests/promises.toml` by `python -m tests.conformance docs/conformance.md`; a test fails when it is
stale. What no test shows yet says so. The rule and the reason of each
invariant, and where the code keeps it: [invariants](invariants.md).

`pytest -k` finds the tests of a promise by its sentence, with `_` for whatever is no letter or digit:
`pytest tests/integration -k a_second_start_is_refused`."""


@dataclass(frozen=True, slots=True)
class Test:
    file: str
    name: str
    invariants: frozenset[int]

    @property
    def reference(self) -> str:
        return f"{self.file}::{self.name}"


class Incomplete(Exception):
    """A promise names a test that does not exist, or a test an invariant that does not."""


def collect() -> list[Test]:
    """Every test of the tree, in order of file and line."""
    files = [*sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")), *_ELSEWHERE]
    return [test for file in files for test in _tests(file, (ROOT / file).read_text(encoding="utf-8"))]


def _tests(file: str, source: str) -> Iterator[Test]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Test(file, node.name, frozenset(_invariants(node)))


def _invariants(node: ast.FunctionDef) -> Iterator[int]:
    named = re.match(r"test_invariant_(\d+)_", node.name)
    if named:
        yield int(named[1])
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.invariant":
            yield from (int(ast.literal_eval(argument)) for argument in decorator.args)


def page() -> str:
    """The whole document."""
    tests = collect()
    invariants = tomllib.loads(PROMISES.read_text(encoding="utf-8"))["invariant"]
    return "\n".join(
        [
            _INTRODUCTION,
            "",
            *_invariant_lines(invariants, tests),
            *_promise_lines(promises(), tests),
        ]
    )


def promises() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = tomllib.loads(PROMISES.read_text(encoding="utf-8"))["promise"]
    return entries


def sentences_by_test() -> dict[str, set[str]]:
    """For each test, the promises it keeps as words for `pytest -k`: `a_second_start_is_refused`, `invariant_7`."""
    sentences: dict[str, set[str]] = defaultdict(set)
    for entry in promises():
        for reference in entry.get("tests", ()):
            sentences[reference].add(keyword(entry["line"]))
    for test in collect():
        sentences[test.reference] |= {f"invariant_{number}" for number in test.invariants}
    return sentences


def keyword(sentence: str) -> str:
    return re.sub(r"\W+", "_", sentence).strip("_").lower()


def _invariant_lines(invariants: list[dict[str, Any]], tests: list[Test]) -> Iterator[str]:
    by_reference = _by_reference(tests)
    known = {entry["number"] for entry in invariants}
    for test in tests:
        if not test.invariants <= known:
            raise Incomplete(f"{test.reference} names an invariant that promises.toml does not know")
    yield "## Invariants"
    yield ""
    for entry in invariants:
        kept_by = [test for test in tests if entry["number"] in test.invariants]
        kept_by += _named(f"invariant {entry['number']}", entry, by_reference)
        yield from _entry(f"{entry['number']}. **{entry['title']}**", "    ", kept_by, entry.get("left", ""))
    yield ""


def _promise_lines(promises: list[dict[str, Any]], tests: list[Test]) -> Iterator[str]:
    by_reference = _by_reference(tests)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in promises:
        groups[entry["group"]].append(entry)
    for group, entries in groups.items():
        yield f"## {group}"
        yield ""
        for entry in entries:
            kept_by = _named(f"{group}, {entry['line']}", entry, by_reference)
            yield from _entry(f"- **{entry['line']}**", "  ", kept_by, entry.get("left", ""))
        yield ""


def _by_reference(tests: list[Test]) -> dict[str, Test]:
    return {test.reference: test for test in tests}


def _named(promise: str, entry: dict[str, Any], by_reference: dict[str, Test]) -> list[Test]:
    missing = [reference for reference in entry.get("tests", ()) if reference not in by_reference]
    if missing:
        raise Incomplete(f"{promise}: there is no test {', '.join(missing)}")
    return [by_reference[reference] for reference in entry.get("tests", ())]


def _entry(heading: str, indent: str, tests: list[Test], left: str) -> Iterator[str]:
    yield heading if tests else f"{heading}: not shown yet"
    for test in tests:
        yield f"{indent}- [{_sentence(test.name)}](../{test.file})"
    if left:
        yield f"{indent}- not shown yet: {left}"


def _sentence(name: str) -> str:
    return re.sub(r"^test_(invariant_\d+_)?", "", name).replace("_", " ")


def main() -> None:
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
