"""The command line without a pipeline: overview, version, errors, exit status, and that it starts fast."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from headwater.cli import main as front
from headwater.errors import ConfigError, HeadwaterError, SlotError

LOST_SLOT = SlotError(
    'replication slot "headwater_apply_1" can no longer serve changes',
    detail="Postgres reports wal_status=lost\nand a second line",
    hint="Copy the tables again.",
)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        front.main(list(arguments))
    return int(caught.value.code or 0)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setattr(front.LazyGroup, "get_command", lambda self, context, name: command)


def test_help_lists_every_command_and_imports_no_pyspark() -> None:
    program = (
        "import sys, headwater\nfrom headwater.cli.main import main\n"
        "try: main(['--help'])\nfinally: print([m for m in sys.modules if m.partition('.')[0] in ('pyspark', 'numba')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    for name, command in front.COMMANDS.items():
        assert re.search(rf"^  {name}\s+{re.escape(command.help)}", done.stdout, re.M)
    assert done.stdout.rstrip().endswith("[]")


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert re.fullmatch(r"headwater \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_an_unknown_command_is_wrong_usage() -> None:
    assert run("rum") == 2


def test_an_error_is_shown_in_three_parts_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, LOST_SLOT)
    assert run("run") == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        'error: replication slot "headwater_apply_1" can no longer serve changes\n'
        "detail: Postgres reports wal_status=lost\n        and a second line\n"
        "hint: Copy the tables again.\n"
    )


@pytest.mark.parametrize(("error", "status"), [(ConfigError("wrong"), 2), (HeadwaterError("failed"), 1)])
def test_wrong_settings_end_with_status_2_and_failures_with_1(
    monkeypatch: pytest.MonkeyPatch, error: HeadwaterError, status: int
) -> None:
    failing(monkeypatch, error)
    assert run("run") == status


@pytest.mark.invariant(16)
def test_an_error_never_shows_what_looks_like_a_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, HeadwaterError("no", detail="connecting to postgresql://me:hunter2@db failed"))
    run("run")
    assert "hunter2" not in capsys.readouterr().err


def test_a_missing_optional_package_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'pyiceberg'", name="pyiceberg.catalog")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(HeadwaterError, match="pyiceberg") as caught:
        front.cli.main(["demo"], standalone_mode=False)
    assert "headwater[demo]" in caught.value.hint


def test_commands_that_hints_and_documents_name_exist() -> None:
    root = Path(__file__).parents[3]
    texts = [path.read_text(encoding="utf-8") for path in [*(root / "src").rglob("*.py"), root / "README.md"]]
    named = {name for text in texts for name in re.findall(r"`headwater ([a-z]+)", text)}
    assert named <= set(front.COMMANDS)
