"""A stop of a run reaches its parts, and a part's stop nobody else."""

from __future__ import annotations

from headwater.engine.stop import Stop


def test_a_stop_reaches_all_parts_also_those_made_later() -> None:
    whole = Stop()
    part = whole.part()
    whole.set()
    assert part.is_set()
    assert whole.part().is_set()


def test_a_parts_stop_concerns_nobody_else() -> None:
    whole = Stop()
    one, other = whole.part(), whole.part()
    one.set()
    assert not whole.is_set()
    assert not other.is_set()
