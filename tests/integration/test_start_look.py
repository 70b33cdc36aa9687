"""What the destination has of every table is looked at when a run begins, and not when its next change comes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest

from headwater.engine import retry
from headwater.errors import DestinationUnavailable, HeadwaterError, WatermarkError
from headwater.schema.table import TableId
from headwater.store.memory import MemoryStore
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import running


class Emptied(MemoryTables):
    """Unreachable at first; then it has lost one table, and holds less of another than was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts = 0
        self.asked: list[TableId] = []

    def missing_tables(self, table_ids: Sequence[TableId]) -> Mapping[TableId, HeadwaterError]:
        if not self.copies:
            return {}
        self.attempts += 1
        if self.attempts <= 2:
            raise DestinationUnavailable("the lake is unreachable", detail="AccessDeniedException: /lake", hint="Wait.")
        self.asked = list(table_ids)
        by_name = {self._names[table]: table for table in table_ids}
        return {
            by_name["gone"]: WatermarkError("lake table gone is gone", hint="Resync it."),
            by_name["behind"]: WatermarkError("lake table behind is behind the recorded position", hint="Resync it."),
        }


@pytest.mark.invariant(5)
def test_a_lake_table_that_is_lost_or_behind_errs_at_start_once_the_lake_is_reachable(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_SECONDS", 0.02)
    for name in ("gone", "behind", "whole"):
        database.execute(f"create table {name}(id int primary key, n int); insert into {name} values (1, 1)")
    database.execute("create publication shop for all tables")
    destination, store = Emptied(), MemoryStore()
    with running(database, destination, store) as run:
        run.wait_states("ready", 3)
        run.wait_caught_up()
        run.stop()
    del destination.tables["gone"]
    with caplog.at_level(logging.WARNING), running(database, destination, store) as run:
        run.wait_states("errored", 2)
        run.wait_states("ready", 1)
        assert run.states()["public.whole"] == "ready"
        run.stop()
    assert len(destination.asked) == 3
    assert sorted(destination.copies) == ["behind", "gone", "whole"]
    assert "table public.gone: lake table gone is gone" in caplog.text
    assert caplog.text.count("AccessDeniedException: /lake") == 2
