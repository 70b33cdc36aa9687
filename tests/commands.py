"""`headwater` as a user calls it: a settings file, and commands in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import Database

HEADWATER = [sys.executable, "-m", "headwater.cli.main"]


def write_settings(
    database: Database,
    directory: Path,
    *,
    id: int = 1,
    publication: str = "shop",
    username: str | None = None,
    extra: str = "",
) -> Path:
    """The settings file of a pipeline with its lake beside it. The password is in a file of its own."""
    settings = database.settings
    assert settings.password is not None
    (directory / "password").write_text(settings.password.reveal())
    file = directory / "pipeline.toml"
    file.write_text(
        f"""
id = {id}
publication_name = {json.dumps(publication)}

[pg_connection]
host = {json.dumps(settings.host)}
port = {settings.port}
name = {json.dumps(settings.database)}
username = {json.dumps(username if username is not None else settings.username)}
password = {{ file = "password" }}

[destination]
warehouse = "lake"

[spark]
master = "local[2]"
{extra}
"""
    )
    return file


def headwater(*arguments: object, status: int = 0, answer: str = "", environ: dict[str, str] | None = None) -> str:
    """Run a command to its end; what it said."""
    environment = {**os.environ, "COLUMNS": "120", **(environ or {})}
    command = [*HEADWATER, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, input=answer, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr
