"""Each fix is needed: with it taken back, a seed of the fuzzer or a test fails. All of them: `make test-mutations`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.mutate import Mutation, is_caught, mutations, run_with

SHORT = {"a_label_renamed_there_and_back", "a_stream_that_is_too_old", "an_old_row_without_its_key"}
"""In every run of the tests; the others take a quarter of an hour."""
ALL = [
    pytest.param(mutation, id=mutation.name, marks=() if mutation.name in SHORT else pytest.mark.slow)
    for mutation in mutations()
]


def test_every_mutation_still_finds_its_line(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent / "src" / "headwater"
    times = {
        mutation.name: (root / mutation.file).read_text(encoding="utf-8").count(mutation.find)
        for mutation in mutations()
    }
    assert {name for name, count in times.items() if count != 1} == set()


@pytest.mark.timeout(650)
@pytest.mark.parametrize("mutation", ALL)
def test_a_mend_that_is_taken_back_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    done = run_with(mutation, tmp_path, mutation.options)
    assert is_caught(done), done.stdout[-3000:] + done.stderr[-1000:]
