"""The jars Spark needs for the lake, their versions in one place, and how a session gets them.

The set-up resolves them once (`python -m headwater.spark.jars`) through Spark's own resolver, so a user's mirrors and
settings count, and keeps the files. A session then names files and resolves nothing; without the files it falls back to
the coordinates.

A version does not fix the content of a file, and mirrors and caches can be written by others. So the digests are kept in
`jars.sha256`, and a file is compared with its digest whenever it is fetched and whenever it is used (0.2 s for both).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headwater.cache import cache_directory, install
from headwater.errors import HeadwaterError
from headwater.spark.java import java_home


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A Maven artifact."""

    group: str
    artifact: str
    version: str

    def __str__(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"

    @property
    def file_name(self) -> str:
        """As Spark's resolver names the file."""
        return f"{self.group}_{self.artifact}-{self.version}.jar"


ICEBERG = Coordinate("org.apache.iceberg", "iceberg-spark-runtime-4.1_2.13", "1.12.0")
SQLITE = Coordinate("org.xerial", "sqlite-jdbc", "3.50.3.0")
JARS = (ICEBERG, SQLITE)

# Spark brings a newer one than sqlite-jdbc asks for, and two of them conflict.
_EXCLUDED = "org.slf4j:slf4j-api"


def jar_settings() -> dict[str, str]:
    """The Spark settings that put the jars on the class path; to be set before the session's JVM starts."""
    fetched = jar_directory()
    # Not spark.driver.extraClassPath: another class path than Spark's own made a session start in 13 s instead of 8.
    if fetched.is_dir():
        _check_whole(fetched, JARS)
        return {"spark.jars": ",".join(str(path) for path in sorted(fetched.glob("*.jar")))}
    return {
        "spark.jars.packages": ",".join(str(coordinate) for coordinate in JARS),
        "spark.jars.excludes": _EXCLUDED,
    }


def jar_directory(jars: Sequence[Coordinate] = JARS) -> Path:
    """Where the jars of exactly these versions are kept, if they have been fetched."""
    coordinates = ",".join(str(coordinate) for coordinate in jars)
    return cache_directory() / "jars" / hashlib.sha256(coordinates.encode()).hexdigest()[:16]


def fetch(jars: Sequence[Coordinate] = JARS) -> Path:
    """Resolve the jars and keep their files; at once if they are there already."""

    def fill(target: Path) -> None:
        _resolve(jars, target)
        _check_whole(target, jars)

    directory = install(jar_directory(jars), fill)
    _check_whole(directory, jars)
    return directory


def digests() -> Mapping[str, str]:
    """File name to SHA-256, of every jar that we name, those of the benchmarks among them."""
    lines = Path(__file__).with_name("jars.sha256").read_text().splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def check(paths: Iterable[Path]) -> None:
    """HeadwaterError for a file that has the name of a jar of ours and other content. The user's own jars are not checked."""
    pinned = digests()
    for path in paths:
        if path.name not in pinned:
            continue
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != pinned[path.name]:
            raise HeadwaterError(
                f"jar {path} is not the file that was pinned",
                detail=f"its SHA-256 is {found}; expected {pinned[path.name]}",
                hint=f"Find out where it came from: a mirror, or another user of {path.parent}. Then remove the file and run "
                "`make setup`.",
            )


def _check_whole(directory: Path, jars: Sequence[Coordinate]) -> None:
    """All of these jars, and none without a digest: everything in the directory goes on the class path."""
    names = {path.name for path in directory.glob("*.jar")}
    odd, missing = sorted(names - digests().keys()), sorted({jar.file_name for jar in jars} - names)
    if odd or missing:
        raise HeadwaterError(
            f"{directory / odd[0]} is none of the expected jars"
            if odd
            else f"jar {missing[0]} is missing in {directory}",
            detail=f"found {', '.join(sorted(names)) or 'none'}; expected {', '.join(jar.file_name for jar in jars)}",
            hint=f"Remove {directory} and run `make setup` to fetch the jars again.",
        )
    check(sorted(directory / name for name in names))


def _resolve(jars: Sequence[Coordinate], target: Path) -> None:
    with tempfile.TemporaryDirectory() as ivy:
        # Resolving happens before the application is looked at; printing the version is the least one it can be asked.
        command = [str(_spark_home() / "bin" / "spark-submit"), "--master", "local[1]"]
        command += ["--packages", ",".join(str(coordinate) for coordinate in jars)]
        command += ["--exclude-packages", _EXCLUDED, "--conf", f"spark.jars.ivy={ivy}"]
        command += ["--class", "org.apache.spark.deploy.SparkSubmit", "spark-internal", "--version"]
        environment = {**os.environ, "JAVA_HOME": str(java_home()), "SPARK_HOME": str(_spark_home())}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        found = sorted((Path(ivy) / "jars").glob("*.jar"))
        if len(found) < len(jars):
            raise HeadwaterError(
                "the jars for Spark could not be fetched",
                detail=_reason(run.stderr),
                hint="Check access to Maven Central, or set a mirror in spark.jars.ivySettings, then run `make setup`.",
            )
        for path in found:
            shutil.move(path, target / path.name)


def _spark_home() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _reason(output: str) -> str:
    telling = [
        line.strip() for line in output.splitlines() if "unresolved" in line.lower() or "exception" in line.lower()
    ]
    return "; ".join(telling[-3:]) or "the resolver gave no reason"


def main() -> None:
    for coordinate in JARS:
        print(f"jar {coordinate}", flush=True)
    try:
        fetch()
    except HeadwaterError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
