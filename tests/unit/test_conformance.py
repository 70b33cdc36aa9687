from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conformance import ROOT, collect, keyword, page, promises, sentences_by_test


def test_the_page_of_promises_is_what_the_tests_say() -> None:
    document = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert document == page(), "run: python -m tests.conformance docs/conformance.md"


def test_every_invariant_has_a_test() -> None:
    assert {number for test in collect() for number in test.invariants} >= set(range(1, 17))


SHOWN_IN_INTEGRATION = ("Start and stop", "Copy", "Hand-off", "Restart", "Errors", "Publication", "Size")


@pytest.mark.parametrize("group", SHOWN_IN_INTEGRATION)
def test_every_promise_is_shown_over_a_real_server_and_found_by_its_sentence(group: str) -> None:
    entries = [entry for entry in promises() if entry["group"] == group]
    assert entries
    by_test = sentences_by_test()
    for entry in entries:
        found = [test for test, sentences in by_test.items() if keyword(entry["line"]) in sentences]
        assert any(test.startswith("tests/integration/") for test in found), entry["line"]
        assert "left" not in entry, entry["line"]


def test_a_promise_is_found_by_its_sentence() -> None:
    file, line = "tests/integration/test_partitions.py", "nested partitions and single leaves"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", file, "-k", keyword(line)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{file}::" in done.stdout
