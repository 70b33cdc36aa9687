"""What several parts need to agree on is written once, or is compared here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headwater
from headwater.changes import EPOCH_2000_SECONDS
from headwater.source.lock import LOCK_CLASS
from headwater.source.slots import apply_slot_name, sync_slot_prefix
from headwater.testing import source_rows
from headwater.wire import startup

SOURCE = Path(headwater.__file__).parent


def constants() -> list[tuple[str, object]]:
    """Every constant of the code, with the file it stands in."""
    return [
        (str(path.relative_to(SOURCE)), node.value)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
    ]


@pytest.mark.parametrize(
    ("value", "home"),
    [
        (LOCK_CLASS, "source/lock.py"),
        (EPOCH_2000_SECONDS, "changes.py"),
        (apply_slot_name(1).removesuffix("1"), "source/slots.py"),
        (sync_slot_prefix(1).removesuffix("1_"), "source/slots.py"),
    ],
)
def test_numbers_and_names_that_several_use_stand_in_one_file(value: object, home: str) -> None:
    assert {file for file, found in constants() if type(found) is type(value) and found == value} == {home}


def test_the_comparison_reads_under_the_settings_that_the_product_reads_under() -> None:
    """It has a list of its own, as it has decoders of its own; where the lists differ, so would the texts of equal values."""
    assert {name: startup.PINNED[name] for name in source_rows.PINNED} == source_rows.PINNED
    assert source_rows.PINNED["row_security"] == "off"


@pytest.mark.parametrize(
    ("text", "home"),
    [
        # Arrow types as Spark's, a value's text as the stream has it, the settings of a session.
        ("TimestampNTZType", "spark/types.py"),
        ("num_nulls(", "source/pg_types.py"),
        ('"IntervalStyle"', "wire/startup.py"),
    ],
)
def test_what_a_value_looks_like_is_said_in_one_file(text: str, home: str) -> None:
    shipped = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    found = {str(path.relative_to(SOURCE)) for path, code in shipped.items() if text in code}
    assert {file for file in found if not file.startswith("testing/")} == {home}
