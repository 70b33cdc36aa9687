"""Mends taken back, one at a time, each in a copy of the source; and the search for a seed of the fuzzer that notices.

`python -m tests.mutations.mutate NAME ...` tries seeds from 20,000 on until one fails, and prints it.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
ROOT = _HERE.parent.parent
FUZZ = "tests/fuzz/test_fuzz.py"
_SEARCHED = (20_000, 20_050)
_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Mutation:
    name: str
    file: str
    find: str
    put: str
    caught_by: str | int
    """Options for pytest, or a seed."""

    @property
    def options(self) -> list[str]:
        if isinstance(self.caught_by, int):
            return [FUZZ, "--fuzz-seeds", f"{self.caught_by}:{self.caught_by + 1}"]
        # A path, and what comes behind -k, which may have spaces.
        path, _, wanted = self.caught_by.partition(" -k ")
        return [path, *(["-k", wanted] if wanted else [])]


def mutations() -> list[Mutation]:
    found = tomllib.loads((_HERE / "mutations.toml").read_text(encoding="utf-8"))
    return [Mutation(name, **fields) for name, fields in found.items()]


def is_compiled(file: str) -> bool:
    """Whether kernels are compiled from this file, or use its constants: Numba sees no change of another file."""
    module = "headwater." + file.removesuffix(".py").replace("/", ".")
    kernels = [path for path in (ROOT / "src").rglob("*.py") if "numba" in path.read_text(encoding="utf-8")]
    imports = (node for path in kernels for node in ast.walk(ast.parse(path.read_bytes())))
    return ROOT / "src" / "headwater" / file in kernels or any(
        isinstance(node, ast.ImportFrom) and node.module == module and any(name.name.isupper() for name in node.names)
        for node in imports
    )


def source_with(mutation: Mutation, directory: Path) -> Path:
    """A copy of the whole source with the mutation in it; the directory to import it from."""
    # Compiled kernels are copied too: to compile them takes 20 s.
    left_out = "__pycache__" if is_compiled(mutation.file) else "*.pyc"
    shutil.copytree(ROOT / "src", directory / "src", ignore=shutil.ignore_patterns(left_out))
    file = directory / "src" / "headwater" / mutation.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutation.find) == 1, (
        f"{mutation.name}: what is to be replaced is {text.count(mutation.find)} times there"
    )
    file.write_text(text.replace(mutation.find, mutation.put), encoding="utf-8")
    return directory / "src"


def run_with(mutation: Mutation, directory: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    source = source_with(mutation, directory)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )


def is_caught(done: subprocess.CompletedProcess[str]) -> bool:
    """A test failed; an error before or behind a test proves nothing."""
    return done.returncode == 1 and re.search(r"^(=+ )?1 failed", done.stdout, re.MULTILINE) is not None


def search(name: str) -> str:
    mutation = next(mutation for mutation in mutations() if mutation.name == name)
    with tempfile.TemporaryDirectory() as directory:
        first, end = _SEARCHED
        done = run_with(mutation, Path(directory), [FUZZ, "--fuzz-seeds", f"{first}:{end}"])
    found = re.search(r"^FAILED .*\[seed_(\d+)\]", done.stdout, re.MULTILINE)
    return found[1] if found and is_caught(done) else "not caught"


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(f"{wanted}: {search(wanted)}", flush=True)
