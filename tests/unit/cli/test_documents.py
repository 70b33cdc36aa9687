"""Code in the documents is code that runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from headwater.config import Settings, load_settings

ROOT = Path(__file__).parents[3]


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_the_readmes_python_makes_valid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly = ModuleType("headwater.assembly")
    build = MagicMock()
    assembly.build = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headwater.assembly", assembly)
    (code,) = blocks("README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    exec(code, {})
    (settings,) = build.call_args.args
    assert isinstance(settings, Settings)
    settings.validate()


@pytest.mark.parametrize("document", ["docs/getting-started.md", "docs/configuration.md"])
def test_the_settings_in_a_document_are_valid(document: str) -> None:
    (text,) = blocks(document, "toml")
    load_settings(text, {"SHOP_PASSWORD": "x"}).validate()


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
