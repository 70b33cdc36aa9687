"""docs/architecture.md lists the files that a copied row and a streamed UPDATE go through: those, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Database
from tests.walks.page import ROOT, files_of, listed
from tests.walks.record import record


@pytest.mark.timeout(600)
def test_the_lists_of_files_are_those_that_a_copied_row_and_an_update_execute(
    database: Database, tmp_path: Path
) -> None:
    document = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for walk, calls in record(database, tmp_path).items():
        executed = {module for _, modules in files_of(walk, calls) for module in modules}
        assert set(listed(document, walk)) == executed, f"the list of the {walk} is stale: make walks"
