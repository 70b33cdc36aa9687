"""`headwater run`, with a socket on which a test asks what the process holds.

python -m tests.soak.process pipeline.toml measure.sock
"""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import sys
import threading
from pathlib import Path

import pyarrow as pa
from pyspark import SparkContext
from rich.console import Console

from headwater.cli.run import run_until_stopped
from headwater.config import load_settings
from headwater.observability.log import configure
from headwater.observability.progress import Progress


def _status(process: int | str, field: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise AssertionError(field)


def _held(process: int | str) -> dict[str, int]:
    """Files and sockets that are open, by the system's own list."""
    kinds = []
    for entry in os.scandir(f"/proc/{process}/fd"):
        try:
            kinds.append(os.readlink(entry.path))
        except OSError:
            continue  # closed meanwhile
    sockets = sum(kind.startswith("socket:") for kind in kinds)
    return {"sockets": sockets, "files": len(kinds) - sockets, "threads": _status(process, "Threads")}


def measured() -> dict[str, int]:
    """What is held once everything that can be given back was given back."""
    gc.collect()
    found = {f"python_{name}": count for name, count in _held("self").items()}
    found["python_objects"] = len(gc.get_objects())
    found["python_resident_kib"] = _status("self", "VmRSS")
    found["arrow_kib"] = pa.total_allocated_bytes() >> 10
    context = SparkContext._active_spark_context
    if context is not None:
        jvm = context._jvm
        assert jvm is not None
        for _ in range(3):
            jvm.java.lang.System.gc()
        pid = int(jvm.java.lang.ProcessHandle.current().pid())
        found |= {f"jvm_{name}": count for name, count in _held(pid).items()}
        memory = jvm.java.lang.management.ManagementFactory.getMemoryMXBean()
        found["jvm_heap_kib"] = int(memory.getHeapMemoryUsage().getUsed()) >> 10
        # Heap use goes up and down; what is never given back is counted.
        readers = jvm.org.apache.iceberg.arrow.ArrowAllocation.rootAllocator().getChildAllocators()
        found["jvm_arrow_allocators"] = int(readers.size())
        found["jvm_non_heap_kib"] = int(memory.getNonHeapMemoryUsage().getUsed()) >> 10
    return found


def _answer(listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        with client:
            client.sendall(json.dumps(measured()).encode())


def main() -> None:
    settings_file, path = sys.argv[1:]
    settings = load_settings(Path(settings_file))
    configure(logging.INFO, settings.secrets())
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=_answer, args=(listener,), name="soak-measure", daemon=True).start()
    run_until_stopped(settings, Console(), Progress())


if __name__ == "__main__":
    main()
