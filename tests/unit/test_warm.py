"""No run waits for the compiler: the set-up compiles every kernel, and each is kept."""

from __future__ import annotations

from pathlib import Path

from headwater import warm

SOURCE = Path(warm.__file__).parent


def test_the_set_up_compiles_every_kernel_and_each_is_kept() -> None:
    with_kernels = [path for path in SOURCE.rglob("*.py") if "@njit(" in path.read_text(encoding="utf-8")]
    assert {Path(module.__file__ or "") for module in warm.MODULES} == set(with_kernels)
    for module in warm.MODULES:
        # Those with an underscore are called by kernels only, and compiled with them.
        kernels = [value for name, value in vars(module).items() if hasattr(value, "py_func") and name[0] != "_"]
        assert kernels
        for kernel in kernels:
            assert kernel.signatures, f"{kernel} is compiled when it is first called"
            assert kernel.stats.cache_path, f"{kernel} is compiled in every process"
