"""Which Spark has executors on disks of their own. What follows from that: tests/integration/test_lake_cluster.py."""

from __future__ import annotations

from headwater.destinations.iceberg.shared_storage import is_one_process


def test_only_a_master_that_is_local_shares_its_disk_for_certain() -> None:
    assert all(map(is_one_process, ("local", "local[2]", "local[*]")))
    assert not any(map(is_one_process, ("local-cluster[1,1,1024]", "spark://host:7077", "yarn", "k8s://x")))
