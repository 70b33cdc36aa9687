"""Damages captured bytes at random and gives them to the decoders, for a chosen time.

    python -m tests.fuzz.decoders --seconds 60 [--seed 7] [--target pgoutput]
    python -m tests.fuzz.decoders capture

Run with NUMBA_BOUNDSCHECK=1 and a NUMBA_CACHE_DIR of its own: compiled loops then raise where they would read over an end.
What is found is written to the corpus, which each run begins with, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import resource
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from headwater.errors import HeadwaterError
from headwater.wire import value_kernels
from tests.fuzz.decoders.capture import capture
from tests.fuzz.decoders.mutate import mutated
from tests.fuzz.decoders.targets import CUT_ANYWHERE, TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
MEMORY_BYTES = 3 << 30
"""How much more than at the start may be asked for; what 64 KiB of bytes stand for is a fraction of it."""
HANG_SECONDS = 30.0


class Finding(Exception):
    """A decoder did what it must not."""


def bounds_are_checked() -> bool:
    empty = np.zeros(0, np.uint8)
    try:
        value_kernels.integers(empty, np.zeros(1, np.int64), np.full(1, 2, np.int64), np.zeros(1, np.int16))
    except IndexError:
        return True
    return False


def tried(name: str, target: Target, data: bytes, dice: random.Random) -> None:
    """Raise Finding unless the bytes are decoded, or refused by an error of ours, however they are cut."""
    outcomes = []
    for cut in (None, dice):
        began = time.monotonic()
        try:
            outcomes.append(repr(target(data, cut)))
        except HeadwaterError:
            outcomes.append("refused")
        except BaseException as error:
            raise Finding(f"{type(error).__name__}: {traceback.format_exc(limit=-4)}") from None
        if time.monotonic() - began > HANG_SECONDS:
            raise Finding(f"took {time.monotonic() - began:.0f} s for {len(data)} bytes")
    if name in CUT_ANYWHERE and outcomes[0] != outcomes[1]:
        raise Finding(f"cut differently, the same bytes give {outcomes[0][:300]} and {outcomes[1][:300]}")


def corpus_of(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*.bin"))]


def fuzz(name: str, target: Target, seconds: float, seed: int) -> tuple[int, list[str]]:
    """How many inputs were tried, and what was found."""
    seeds, count = corpus_of(name), 0
    found: list[str] = []
    dice = random.Random(f"{name} {seed}")
    deadline = time.monotonic() + seconds
    while count < len(seeds) or (time.monotonic() < deadline and len(found) < 5):
        data = seeds[count] if count < len(seeds) else mutated(dice, dice.choice(seeds), seeds)
        count += 1
        try:
            tried(name, target, data, dice)
        except Finding as finding:
            path = CORPUS / name / f"found_{hashlib.sha256(data).hexdigest()[:12]}.bin"
            path.write_bytes(data)
            found.append(f"{name}: {path.name}: {finding}")
    return count, found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.decoders", description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="?", choices=["capture"])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--target", choices=list(TARGETS))
    chosen = parser.parse_args()
    if chosen.command == "capture":
        capture(CORPUS)
        return 0
    logging.disable(logging.CRITICAL)
    if not bounds_are_checked():
        print("bounds are not checked: set NUMBA_BOUNDSCHECK=1 and a NUMBA_CACHE_DIR of its own", file=sys.stderr)
        return 2
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, -1))
    targets = {name: target for name, target in TARGETS.items() if chosen.target in (None, name)}
    findings = []
    for name, target in targets.items():
        count, found = fuzz(name, target, chosen.seconds / len(targets), chosen.seed)
        print(f"{name}: {count} inputs, {len(found)} findings, seed {chosen.seed}")
        findings += found
    print("\n".join(findings), end="")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
