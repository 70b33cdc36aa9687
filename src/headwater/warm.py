"""Compile the kernels: `python -m headwater.warm`, run by the set-up so that no first run waits for the compiler."""

from __future__ import annotations

import time

started = time.perf_counter()

from headwater.destinations.iceberg import parts  # noqa: E402 - the import is what compiles
from headwater.wire import chunks, copy_kernels, kernels, numeric_kernels, replication, value_kernels  # noqa: E402

MODULES = (chunks, copy_kernels, kernels, numeric_kernels, parts, replication, value_kernels)

if __name__ == "__main__":
    print(f"kernels ready: {len(MODULES)} modules in {time.perf_counter() - started:.1f} s")
