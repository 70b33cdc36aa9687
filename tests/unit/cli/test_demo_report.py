"""The demo's measurements and closing words."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from headwater.cli.demo_report import (
    ComparedTable,
    Facts,
    MeasuredProgress,
    how_to_open,
    lags,
    percentile,
    show_comparison,
)


def test_a_transactions_lag_ends_at_the_first_confirmed_position_past_it() -> None:
    progress = MeasuredProgress()
    for position in (100, 100, 200):
        progress.position(received=position, confirmed=position, server=300)
    first, second = progress.confirmed_at(1), progress.confirmed_at(101)
    assert first is not None
    assert second is not None
    assert progress.confirmed_at(100) == first
    assert progress.confirmed_at(201) is None
    assert lags([(100, first - 2.0), (150, second - 1.0), (500, 0.0)], progress) == [1.0, 2.0]


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([3.0], 0.99)) == (50.0, 99.0, 3.0)


def test_a_table_that_differs_is_shown_as_such() -> None:
    out = io.StringIO()
    tables = [ComparedTable("public.a", 10, 0, 0, 0), ComparedTable("public.b", 10, 1, 0, 0)]
    show_comparison(Console(file=out, width=100), tables)
    a, b = (line for line in out.getvalue().splitlines() if "public." in line)
    assert " equal" in a
    assert "not equal" not in a
    assert "not equal" in b


def test_facts_without_a_measured_lag_say_nothing_of_it() -> None:
    assert len(list(Facts(100, 2.0, 5, 3, []).lines())) == 2
    assert "50 rows/s" in next(Facts(100, 2.0, 5, 3, []).lines())


@pytest.mark.promise("the apply worker pauses shortly, and the longest pause is shown")
def test_the_longest_pause_for_a_hand_off_is_shown() -> None:
    *_, last = Facts(100, 2.0, 5, 3, [], hand_offs=2, longest_pause_seconds=0.25).lines()
    assert last == "paused    0.25 s at most, in 2 hand-offs"


def test_how_to_open_names_the_catalog_that_is_there() -> None:
    assert 'uri="sqlite:////tmp/x/catalog.db"' in how_to_open(Path("/tmp/x"))
