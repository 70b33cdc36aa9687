"""Weeks of running, in short: what a pipeline holds does not grow, whatever happens to its connections."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.soak.soak import SLACK, assert_flat, disturbances, soaking

SECONDS = int(os.environ.get("HEADWATER_SOAK_SECONDS", "3600"))
KINDS = 4
"""Of disturbances; each is met once before anything is measured against it."""

pytestmark = [pytest.mark.crash]


@pytest.mark.timeout(600)
def test_soak_short(tmp_path: Path) -> None:
    """Every disturbance twice, then a restart; make test-all has an hour of it."""
    with soaking(tmp_path) as soak:
        soak.start()
        for _, disturb in zip(range(2 * KINDS), disturbances(soak), strict=False):
            soak.disturb(disturb, 1)
        soak.stop()
        assert_flat(soak.rounds, KINDS)
        soak.start()
        soak.stop()
        soak.assert_equal()
        # What a finding of the start says has lines of its own, and shows no escapes.
        assert "\nhint: " in soak.output.read_text().replace("\n  ", "\n")
        assert "\\n" not in soak.output.read_text()


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_soak_an_hour(tmp_path: Path) -> None:
    end = time.monotonic() + SECONDS
    with soaking(tmp_path) as soak:
        while time.monotonic() < end:
            soak.start()
            soak.rounds.clear()
            part = min(end, time.monotonic() + SECONDS / 3)
            for disturb in disturbances(soak):
                soak.disturb(disturb, 5)
                if time.monotonic() > part and len(soak.rounds) > 2 * KINDS:
                    break
            soak.stop()
            assert_flat(soak.rounds, 2 * KINDS)
            soak.assert_equal()


def test_soak_growth_is_noticed() -> None:
    flat = dict.fromkeys(SLACK, 100)
    assert_flat([flat] * 8, 4)
    for name, slack in SLACK.items():
        leaking = [flat | {name: 100 + (slack + 1) * look // 4} for look in range(12)]
        with pytest.raises(AssertionError, match=name):
            assert_flat(leaking, 4)
