"""What the memory store does beyond the contract, and that the named queries are whole."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from headwater.errors import StoreError
from headwater.schema.table import TableId
from headwater.states import DATA_SYNC, INIT, READY
from headwater.store.memory import HISTORY_KEPT, MemoryStore
from headwater.store.queries import queries

A = TableId(1)


def test_the_history_is_bounded() -> None:
    store = MemoryStore()
    for _ in range(HISTORY_KEPT + 5):
        store.update_table_state(A, INIT)
        store.update_table_state(A, DATA_SYNC)
    for _ in range(HISTORY_KEPT):
        store.rollback_table_state(A)
    with pytest.raises(StoreError):
        store.rollback_table_state(A)


def test_the_same_state_twice_is_one_step_of_history() -> None:
    store = MemoryStore()
    for state in (INIT, DATA_SYNC, DATA_SYNC):
        store.update_table_state(A, state)
    assert store.rollback_table_state(A) == INIT


def test_a_reset_leaves_nothing_to_roll_back_to() -> None:
    store = MemoryStore()
    for state in (INIT, READY):
        store.update_table_state(A, state)
    store.reset_table_states_for_resync()
    with pytest.raises(StoreError, match="no earlier state"):
        store.rollback_table_state(A)


def test_every_named_query_belongs_to_one_pipeline_and_is_one_statement() -> None:
    for name, query in queries().items():
        text = query.decode()
        assert "%(pipeline)s" in text, name
        assert ";" not in text, name
        assert "--" not in text, name
    assert f"$[0 to {HISTORY_KEPT - 1}]" in queries()["update_states"].decode()


def test_every_query_the_store_asks_for_exists() -> None:
    source = resources.files("headwater.store").joinpath("postgres.py").read_text(encoding="utf-8")
    asked = set(re.findall(r'_(?:run|count)\(\s*"(\w+)"', source)) | {"delete_table", "prepare_for_copy"}
    assert asked == queries().keys()
