from __future__ import annotations

import subprocess
import sys

from tests.conformance import ROOT, collect, page, sentences, word


def test_the_page_of_promises_is_what_the_tests_say() -> None:
    document = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert document == page(), "run: python -m tests.conformance docs/conformance.md"


def test_every_invariant_has_a_test() -> None:
    assert {number for test in collect() for number in test.invariants} >= set(range(1, 17))


def test_each_promise_that_is_shown_is_shown_by_an_integration_test_or_a_shipped_suite() -> None:
    places: dict[str, set[str]] = {}
    for reference, lines in sentences().items():
        for line in lines:
            places.setdefault(line, set()).add(reference.partition("/test_")[0])
    elsewhere = {line for line, found in places.items() if "tests/integration" not in found}
    assert all(any(place.startswith("src/headwater/testing") for place in places[line]) for line in elsewhere)


def test_a_promise_is_found_by_its_sentence() -> None:
    file, line = "tests/integration/test_partitions.py", "nested partitions and single leaves"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", file, "-k", word(line)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{file}::" in done.stdout
