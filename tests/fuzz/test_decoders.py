"""Damaged bytes never do more than raise an error of ours: a short run of the decoders' fuzzer, with bounds checks on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.cache import cache_directory
from headwater.errors import ProtocolError
from tests.fuzz.decoders import __main__ as fuzzer
from tests.fuzz.decoders.mutate import frames, mutated
from tests.fuzz.decoders.targets import TARGETS

ROOT = Path(__file__).parents[2]
SECONDS = 16
"""The long form: make fuzz."""


@pytest.mark.timeout(240)
def test_security_decoders_bear_damaged_bytes_with_bounds_checks_on() -> None:
    # Beside the ordinary cache: code with and without checks would take each other's place there.
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(cache_directory() / "bounds-checked-kernels")}
    run = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.decoders", "--seconds", str(SECONDS)],
        cwd=ROOT,
        env=os.environ | checked,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for name in TARGETS:
        assert f"{name}: " in run.stdout


def test_security_the_corpus_holds_what_a_real_server_sends() -> None:
    """Damage to bytes that are refused at their first one would prove nothing."""
    plain, streamed = (fuzzer.CORPUS / "pgoutput" / f"{name}.bin" for name in ("plain", "streamed"))
    assert "truncate" in repr(TARGETS["pgoutput"](plain.read_bytes(), None))
    assert len(repr(TARGETS["pgoutput"](streamed.read_bytes(), None))) > 100
    assert TARGETS["copy_binary"]((fuzzer.CORPUS / "copy_binary" / "every_type.bin").read_bytes(), None) == (2, True)
    for path in (fuzzer.CORPUS / "values").glob("c*.bin"):
        first_binary = TARGETS["values"](path.read_bytes(), None)
        assert isinstance(first_binary, list)
        assert first_binary[0] == 1, path.name


@pytest.mark.parametrize("name", list(TARGETS))
def test_security_mutations_differ_and_are_the_same_for_the_same_seed(name: str) -> None:
    seeds = fuzzer.corpus_of(name)
    first, again = (
        [mutated(dice, seeds[0], seeds) for _ in range(200)] for dice in (random.Random(1), random.Random(1))
    )
    assert first == again
    assert len(set(first)) > 100
    assert all(b"".join(frames(data)) == data for data in first)


def test_security_the_fuzzer_notices_what_it_looks_for() -> None:
    def out_of_bounds(data: bytes, dice: random.Random | None) -> object:
        return data[len(data) + 1]

    def depends_on_the_cut(data: bytes, dice: random.Random | None) -> object:
        return dice is None

    def refuses(data: bytes, dice: random.Random | None) -> object:
        raise ProtocolError("no")

    with pytest.raises(fuzzer.Finding, match="IndexError"):
        fuzzer.tried("pgoutput", out_of_bounds, b"x", random.Random(1))
    with pytest.raises(fuzzer.Finding, match="cut differently"):
        fuzzer.tried("pgoutput", depends_on_the_cut, b"x", random.Random(1))
    fuzzer.tried("pgoutput", refuses, b"x", random.Random(1))
