"""Whether driver and executors see the same warehouse, by what each of them found."""

from __future__ import annotations

import pickle

import pytest

from headwater.destinations.iceberg.shared_storage import Seen, check_seen, is_one_process
from headwater.errors import DestinationError, Retry


def test_hosts_that_see_each_others_files_pass() -> None:
    check_seen("/lake", "driver", [Seen("one", "task-0", True, True), Seen("two", "task-1", True, True)])


@pytest.mark.parametrize("apart", [Seen("two", "task-1", False, True), Seen("two", "task-1", True, False)])
def test_a_host_with_another_disk_is_refused_by_name(apart: Seen) -> None:
    with pytest.raises(DestinationError, match="not shared") as raised:
        check_seen("/lake", "driver-host", [Seen("one", "task-0", True, True), apart])
    assert "driver-host" in raised.value.detail
    assert "two" in raised.value.detail
    assert "one" not in raised.value.detail
    assert raised.value.retry is Retry.NEVER


def test_only_a_master_that_is_local_shares_its_disk_for_certain() -> None:
    assert all(map(is_one_process, ("local", "local[2]", "local[*]")))
    assert not any(map(is_one_process, ("local-cluster[1,1,1024]", "spark://host:7077", "yarn", "k8s://x")))


def test_what_a_task_found_travels() -> None:
    seen = Seen("one", "task-0", True)
    assert pickle.loads(pickle.dumps(seen)) == seen
