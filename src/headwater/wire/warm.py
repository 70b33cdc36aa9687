"""Compile the kernels: `python -m headwater.wire.warm`, run by the set-up so that no first run waits for the compiler."""

from __future__ import annotations

import time

started = time.perf_counter()

from headwater.wire import chunks, kernels, value_kernels  # noqa: E402 - the import is what compiles

if __name__ == "__main__":
    modules = (chunks, kernels, value_kernels)
    print(f"decoder ready: {len(modules)} modules in {time.perf_counter() - started:.1f} s")
