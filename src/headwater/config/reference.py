"""The reference of all settings as Markdown, made from the classes. docs/configuration.md holds it; a test says so.

`python -m headwater.config.reference docs/configuration.md` writes it again between its two marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from headwater.config.pipeline import PipelineConfig
from headwater.config.settings import Settings
from headwater.setting_rules import SettingField, setting_fields

BEGIN, END = "<!-- settings: generated, see headwater.config.reference -->", "<!-- end of settings -->"


def reference() -> str:
    """A section for each table of the file, with a row for each setting."""
    return "\n".join(_sections())


def replace_reference(document: str) -> str:
    """The document with a fresh reference between the marks."""
    before, _, rest = document.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the document lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def _sections() -> Iterator[str]:
    yield from _section("", "At the top of the file", PipelineConfig)
    for one in setting_fields(Settings):
        if one.name != "pipeline":
            yield from _section(one.name, f"`[{one.name}]`", one.type, one.rule.doc)


def _section(path: str, heading: str, cls: type, doc: str = "") -> Iterator[str]:
    fields = setting_fields(cls)
    yield f"### {heading}\n"
    if doc:
        yield f"{doc}\n"
    yield "| setting | type | default | what it is for |"
    yield "|---|---|---|---|"
    for one in fields:
        yield f"| `{one.name}` | {_type(one)} | {_default(one)} | {one.rule.doc} |"
    yield ""
    for one in fields:
        if one.nested and not (path == "" and one.name == "store_pg_connection"):
            inner = f"{path}.{one.name}".lstrip(".")
            yield from _section(inner, f"`[{inner}]`", one.type, one.rule.doc)


def _type(one: SettingField) -> str:
    limits = one.rule.range()
    if isinstance(one.type, type) and issubclass(one.type, StrEnum):
        return ", ".join(f'`"{member.value}"`' for member in one.type)
    word = one.expected().removeprefix("an ").removeprefix("a ")
    return f"{word}, {limits}" if limits and limits != "not empty" else word


def _default(one: SettingField) -> str:
    if one.required:
        return "required"
    if one.nested and one.default is not None:
        return "see below"
    return "none" if one.default in (None, (), {}) else f"`{_toml(one.default)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def main() -> None:
    path = Path(sys.argv[1])
    path.write_text(replace_reference(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
