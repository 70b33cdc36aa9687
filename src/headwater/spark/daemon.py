"""The parent of Spark's Python workers, without the invalidation of import caches in every task.

Spark 4.1 calls `importlib.invalidate_caches()` at the start of each Python task (SPARK-54744), after which the first imports of
the task list every directory on the path again: about 120 ms a task. The call is there for files that were added while
running, and those change `sys.path`, so it is enough to invalidate when the path has changed since the last time.

Started by the JVM as `python -m headwater.spark.daemon pyspark.worker` (`spark.python.daemon.module`).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from pyspark import daemon

_invalidate_caches = importlib.invalidate_caches
_seen: list[str] = []
_worker: Any = daemon.worker
_CLOSED = 1


def invalidate_when_the_path_changed() -> None:
    """What replaces `importlib.invalidate_caches` in the workers."""
    if sys.path != _seen:
        _seen[:] = sys.path
        _invalidate_caches()


def worker_until_closed(sock: Any, authenticated: Any) -> int:
    """What replaces `daemon.worker`: Spark closes workers that were idle for a minute, which is no failure to print."""
    try:
        return int(_worker(sock, authenticated))
    except (BrokenPipeError, ConnectionResetError):
        return _CLOSED


def main() -> None:
    # One replacement before the fork, so that every worker has it, whatever module of pyspark it runs.
    importlib.invalidate_caches = invalidate_when_the_path_changed
    daemon.worker = worker_until_closed
    daemon.manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
