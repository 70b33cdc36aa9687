"""`pytest tests/fuzz --fuzz-seeds 100:200` runs these seeds in place of the short list; from 10,000 on they are focused."""

from __future__ import annotations

import pytest

from tests.fuzz.test_fuzz import SEEDS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seeds", metavar="FIRST:END", help="the seeds to run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames and metafunc.module.__name__ == "tests.fuzz.test_fuzz":
        chosen = metafunc.config.getoption("--fuzz-seeds", default=None)
        seeds = {f"seed_{seed}": seed for seed in range(*map(int, chosen.split(":")))} if chosen else SEEDS
        metafunc.parametrize("seed", seeds.values(), ids=seeds.keys())
