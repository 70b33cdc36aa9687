"""A fresh data directory in a tenth of a second: initdb once per version, then copies.

Each copy gets a system identifier of its own. Servers that share one would look like one server to everything that
checks whether progress belongs to this source.
"""

from __future__ import annotations

import secrets
import struct
import subprocess
from pathlib import Path

from headwater.cache import install
from headwater.errors import HeadwaterError
from headwater.testing.binaries import Installation
from headwater.testing.runtime import ServerUser, runtime_directory

SUPERUSER = "postgres"


def server_environment() -> dict[str, str]:
    """Little, and nothing of the caller's: neither its secrets nor its PG* variables."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def make_data_directory(installation: Installation, user: ServerUser, target: Path) -> None:
    template = runtime_directory() / f"template-{installation.version}-{installation.origin}"
    install(template, lambda partial: _initdb(installation, user, partial))
    # cp keeps owner and modes, and is several times as fast as a copy in Python.
    subprocess.run(["cp", "-a", str(template), str(target)], check=True)
    _new_identity(target)


def _initdb(installation: Installation, user: ServerUser, target: Path) -> None:
    arguments = [f"--username={SUPERUSER}", "--encoding=UTF8", "--no-locale", "--auth=trust", "--no-sync"]
    _run(installation, user, target, "initdb", [*arguments, "--no-instructions"])


def _run(installation: Installation, user: ServerUser, target: Path, program: str, arguments: list[str]) -> None:
    user.own(target)
    target.chmod(0o700)
    command = [str(installation.program(program)), f"--pgdata={target}", *arguments]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=target, env=server_environment(), **user.process_arguments()
    )
    if run.returncode != 0:
        raise HeadwaterError(
            f"{program} of Postgres {installation.major} failed",
            detail=run.stderr.strip() or run.stdout.strip(),
            hint="Free some space in the temporary directory, or set TMPDIR to another one.",
        )


def _new_identity(data: Path) -> None:
    """Write another system identifier into pg_control and the WAL's page headers, as if initdb had chosen it."""
    control = data / "global" / "pg_control"
    content = bytearray(control.read_bytes())
    crc_at = _crc_offset(content)
    # Servers take the upper half from the clock; only equality matters, and the sign bit stays clear.
    identifier = struct.pack("=Q", secrets.randbits(62))
    content[0:8] = identifier
    struct.pack_into("=I", content, crc_at, _crc32c(content[:crc_at]))
    control.write_bytes(content)
    for segment in (data / "pg_wal").glob("[0-9A-F]" * 24):
        with open(segment, "r+b") as wal:
            # XLogLongPageHeaderData: the identifier follows the 24 bytes of the short header.
            wal.seek(24)
            wal.write(identifier)


def _crc_offset(control: bytes | bytearray) -> int:
    """Where the checksum of pg_control lies: the layout differs by version, but only one place fits its own content."""
    for offset in range(64, len(control) - 4, 4):
        stored = control[offset : offset + 4]
        if stored != b"\0\0\0\0" and struct.unpack("=I", stored)[0] == _crc32c(control[:offset]):
            return offset
        if offset > 1024:
            break
    raise HeadwaterError(
        "pg_control has no checksum where one is expected",
        detail="none of its first 1,024 bytes is the CRC-32C of those before it",
        hint="Report this with the version of Postgres.",
    )


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def _crc32c(data: bytes | bytearray) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
