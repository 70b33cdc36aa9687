"""Do driver and executors see the same warehouse? Asked at start, where Spark's master is not local.

With a warehouse that is a path, each host writes data files to a disk of its own unless that path is shared, and the lake's
metadata would name files that only one host has. A URI (s3, gs, hdfs ...) names the same place for all hosts.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark import SparkContext

from headwater.errors import DestinationError, Retry

_TASKS_PER_CORE = 2
"""So that most likely every executor gets one."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one task found, and what the driver found of it. Travels from executor to driver."""

    host: str
    token: str
    sees_driver: bool
    seen_by_driver: bool = False


def is_one_process(master: str) -> bool:
    """Whether driver and executors are one process. `local-cluster` starts processes for its executors."""
    return master == "local" or master.startswith("local[")


def check_shared(context: SparkContext, warehouse: Path) -> None:
    """Tasks write tokens where data files go, and the driver reads them; and the reverse. DestinationError if not."""
    directory = warehouse / ".headwater" / f"shared-{uuid.uuid4().hex}"
    directory.mkdir(parents=True)
    path = str(directory)
    try:
        (directory / "driver").write_text(path)
        count = max(context.defaultParallelism, 1) * _TASKS_PER_CORE

        def look(number: int) -> Seen:
            here = Path(path)
            token, driver = here / f"task-{number}", here / "driver"
            try:
                sees_driver = driver.read_text() == path
                here.mkdir(parents=True, exist_ok=True)
                token.write_text(str(number))
            except OSError:
                sees_driver = False
            return Seen(socket.gethostname(), token.name, sees_driver)

        seen = context.parallelize(range(count), count).map(look).collect()
        check_seen(
            str(warehouse),
            socket.gethostname(),
            [Seen(s.host, s.token, s.sees_driver, (directory / s.token).exists()) for s in seen],
        )
    finally:
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()


def check_seen(warehouse: str, driver: str, seen: Sequence[Seen]) -> None:
    """Refuse the start if any executor has another disk under the warehouse's path."""
    apart = sorted({s.host for s in seen if not (s.sees_driver and s.seen_by_driver)})
    if apart:
        raise DestinationError(
            f"the warehouse {warehouse} is not shared by all hosts of the Spark cluster",
            detail=f"files that the driver on {driver} writes there are not seen on {', '.join(apart)}, or the reverse",
            hint="Set destination.warehouse to a URI that all hosts reach (s3, gs, hdfs), or mount one directory on all of them.",
            retry=Retry.NEVER,
        )
