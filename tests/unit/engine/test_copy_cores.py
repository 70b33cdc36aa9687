"""Which cores a copy may hold while changes of other tables want one too."""

from __future__ import annotations

from headwater.engine.table_sync.copy_cores import CopyCores, CopyShare
from headwater.source.copy_plan import MIN_RANGE_BYTES


def test_a_copy_beside_other_tables_leaves_a_core_and_the_next_one_works_in_small_steps() -> None:
    cores = CopyCores(slots=2, connections=4, copies=4)
    for _ in range(2):
        with cores.share(alone=False) as first, cores.share(alone=False) as second:
            assert first == CopyShare(connections=1)
            assert second == CopyShare(connections=4, range_bytes=MIN_RANGE_BYTES)


def test_a_table_without_others_has_all_cores() -> None:
    with CopyCores(slots=2, connections=4, copies=4).share(alone=True) as share:
        assert share == CopyShare(connections=4)


def test_one_core_is_not_divided_and_a_cluster_is_not_ours_to_divide() -> None:
    assert CopyCores(slots=1, connections=4, copies=4).beside_changes == 1
    assert CopyCores(slots=8, connections=4, copies=4).beside_changes == 4
    with CopyCores(slots=None, connections=4, copies=4).share(alone=False) as share:
        assert share == CopyShare(connections=4)


def test_on_many_cores_every_copy_that_may_come_finds_one() -> None:
    cores = CopyCores(slots=8, connections=4, copies=4)
    with (
        cores.share(alone=False) as first,
        cores.share(alone=False) as second,
        cores.share(alone=False) as third,
        cores.share(alone=False) as fourth,
    ):
        assert [share.connections for share in (first, second, third, fourth)] == [4, 1, 1, 1]
    with cores.share(alone=False) as again:
        assert again.connections == 4
