"""Which transactions a read of the source has seen."""

from __future__ import annotations

import numpy as np

from headwater.events import SourceSnapshot


def test_a_snapshot_sees_what_ended_before_it_and_nothing_else() -> None:
    snapshot = SourceSnapshot.parse("10:20:12,15")
    seen = snapshot.sees(np.array([3, 10, 12, 14, 15, 19, 20, 25], np.uint32))
    assert seen.tolist() == [True, True, False, True, False, True, False, False]
    assert SourceSnapshot.parse("7:7:") == SourceSnapshot(7, 7)


def test_xids_after_a_wraparound_are_put_where_they_belong() -> None:
    epoch = 1 << 32
    after = SourceSnapshot.parse(f"{epoch + 5}:{epoch + 8}:{epoch + 6}")
    assert after.sees(np.array([0xFFFFFFF0, 3, 6, 7, 8], np.uint32)).tolist() == [True, True, False, True, False]
    before = SourceSnapshot.parse(f"{epoch - 8}:{epoch - 4}:")
    assert before.sees(np.array([0xFFFFFFF0, 0xFFFFFFFC, 3], np.uint32)).tolist() == [True, False, False]
