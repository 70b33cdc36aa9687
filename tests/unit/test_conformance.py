from __future__ import annotations

from tests.conformance import ROOT, collect, page


def test_the_page_of_promises_is_what_the_tests_say() -> None:
    document = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert document == page(), "run: python -m tests.conformance docs/conformance.md"


def test_every_invariant_has_a_test() -> None:
    assert {number for test in collect() for number in test.invariants} >= set(range(1, 17))
