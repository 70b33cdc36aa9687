from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.conformance import ROOT, Incomplete, collect, page
from tests.promises import EXPECTED, NOT_SHOWN, SENTENCES, keyword


def test_the_page_of_promises_is_what_the_tests_say() -> None:
    document = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert document == page(collect()), "run: make docs"


def test_every_invariant_has_a_test() -> None:
    assert {number for test in collect() for number in test.invariants} >= set(range(1, 17))


SHOWN_IN_INTEGRATION = ("Start and stop", "Copy", "Hand-off", "Restart", "Errors", "Publication", "Size")


@pytest.mark.parametrize("heading", SHOWN_IN_INTEGRATION)
def test_every_promise_is_shown_over_a_real_server(heading: str) -> None:
    assert EXPECTED[heading]
    over_a_server = [test for test in collect() if test.file.startswith("tests/integration/")]
    assert set(EXPECTED[heading]) <= {sentence for test in over_a_server for sentence in test.promises}
    assert not set(EXPECTED[heading]) & set(NOT_SHOWN)


def test_a_sentence_stands_once() -> None:
    listed = [keyword(sentence) for sentences in EXPECTED.values() for sentence in sentences]
    assert len(listed) == len(set(listed)) == len(SENTENCES)


def test_a_promise_without_a_test_and_an_unknown_promise_are_refused() -> None:
    tests = collect()
    sentence = "a second start is refused"
    with pytest.raises(Incomplete, match=f"no test is marked as showing: {sentence}"):
        page([replace(test, promises=test.promises - {sentence}) for test in tests])
    with pytest.raises(Incomplete, match=r"a promise that tests/promises\.py does not list"):
        page([*tests, replace(tests[0], promises=frozenset({"a third start is refused"}))])
    with pytest.raises(Incomplete, match=r"an invariant that docs/invariants\.md does not have"):
        page([*tests, replace(tests[0], invariants=frozenset({21}))])
    with pytest.raises(Incomplete, match="no test is marked as showing: Write, record, confirm"):
        page([replace(test, invariants=test.invariants - {2}) for test in tests])


def test_a_promise_is_found_by_its_sentence() -> None:
    file, line = "tests/integration/test_partitions.py", "nested partitions and single leaves"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", file, "-k", keyword(line)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{file}::" in done.stdout
