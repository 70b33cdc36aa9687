"""The pages for the next owner name what exists: invariants, files, targets, commands, log lines, tests, tables of the store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwater.cli.main import COMMANDS
from tests.conformance import ROOT, collect, invariants

SOURCE = ROOT / "src" / "headwater"
PAGES = ["CONTRIBUTING.md", "docs/architecture.md", "docs/invariants.md", "docs/glossary.md"]


def text(page: str | Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def code_in(page: str) -> list[str]:
    """What stands between backticks, outside of blocks of code."""
    without_blocks = re.sub(r"^```.*?^```", "", text(page), flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", without_blocks)


def targets() -> dict[str, str]:
    """Each target of the Makefile with the commands it runs."""
    rules = re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)*)", text("Makefile"), re.M)
    return dict(rules)


def test_every_invariant_that_code_or_tests_name_is_on_the_page() -> None:
    listed = invariants()
    assert list(listed) == list(range(1, 21))
    named = {
        int(number)
        for path in SOURCE.rglob("*.py")
        for numbers in re.findall(r"[Ii]nvariants? (\d+(?:(?:, | and )\d+)*)", text(path))
        for number in re.findall(r"\d+", numbers)
    }
    assert named <= set(listed)
    assert {number for test in collect() for number in test.invariants} <= set(listed)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    named = [name for name in code_in(page) if re.fullmatch(r"\.?[A-Za-z][\w.-]*(/[\w.-]+)*/?", name)]
    files = [name for name in named if "/" in name or name.endswith((".py", ".sql", ".toml", ".yaml", ".md", ".lock"))]
    assert files
    # Where several files of one directory are listed, only the first has its path.
    known = {path.name for path in SOURCE.rglob("*.*")}
    missing = [name for name in files if not ((ROOT / name).exists() or (SOURCE / name).exists() or name in known)]
    assert missing == []


@pytest.mark.parametrize("page", [*PAGES, "README.md"])
def test_targets_and_commands_that_a_page_names_exist(page: str) -> None:
    assert set(re.findall(r"\bmake ([a-z-]+)(?=[` \n]*(?:`|\n|ARGS| +#))", text(page))) <= set(targets())
    assert set(re.findall(r"^headwater ([a-z]+)|`headwater ([a-z]+)", text(page), re.M)) <= {
        pair for name in COMMANDS for pair in ((name, ""), ("", name))
    }


@pytest.mark.parametrize("page", ["CONTRIBUTING.md"])
def test_tests_and_log_lines_that_a_page_names_exist(page: str) -> None:
    tests = {test.name for test in collect()}
    assert {name for name in code_in(page) if re.fullmatch(r"test_\w+", name)} <= tests
    source = "\n".join(text(path) for path in SOURCE.rglob("*.py"))
    table = text(page).partition("| line | meaning |")[2].partition("\n\n")[0]
    lines = re.findall(r"^\| `([^`]+)`", table, re.M)
    assert lines
    for line in lines:
        for piece in line.split("..."):
            assert piece.strip() in source, line


def test_statements_for_the_store_name_its_tables() -> None:
    made = {
        name
        for path in (SOURCE / "store" / "migrations").glob("*.sql")
        for name in re.findall(r"TABLE (\S+)", text(path))
    }
    statements = "\n".join(re.findall(r"^```sql\n(.*?)^```", text("CONTRIBUTING.md"), re.M | re.S))
    named = set(re.findall(r"FROM (headwater\.\w+)", statements))
    assert named
    assert named <= made


def test_the_hooks_of_pre_commit_are_the_commands_of_lint() -> None:
    hooks = re.findall(r"^ +entry: (.+)$", text(".pre-commit-config.yaml"), re.M)
    lint = [line.strip().replace("$(BIN)", ".venv/bin") for line in targets()["lint"].splitlines()]
    assert hooks == [command for command in lint if command.startswith(".venv/bin")]


def test_make_docs_writes_every_generated_page() -> None:
    pages = [
        page for page in (ROOT / "docs").glob("*.md") if "by `python -m" in text(page) or "generated, see" in text(page)
    ]
    assert {page.name for page in pages} == set(re.findall(r"docs/(\S+\.md)", targets()["docs"]))
