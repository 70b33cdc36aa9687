from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from headwater.engine.table_states import TableStates
from headwater.errors import StateError
from headwater.lsn import EndLsn
from headwater.observability.progress import Progress
from headwater.schema.table import TableId, TableName
from headwater.states import FINISHED_COPY, INIT, SYNC_WAIT, Actor, Phase, TableState, catchup
from headwater.store.memory import MemoryStore

TABLE = TableId(7)


class SlowStore(MemoryStore):
    """Stands still while it records Init, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.release = threading.Event(), threading.Event()

    def update_table_states(self, updates: Sequence[tuple[TableId, TableState]]) -> None:
        if any(state.phase is Phase.INIT for _, state in updates):
            self.begun.set()
            assert self.release.wait(30)
        super().update_table_states(updates)


def waiting_board(store: MemoryStore) -> TableStates:
    table_states = TableStates(store, Progress())
    table_states.load(TABLE, TableName("public", "orders"), FINISHED_COPY)
    table_states.move(TABLE, SYNC_WAIT, Actor.TABLE_SYNC)
    return table_states


@pytest.mark.promise("catching up that fails does not stop the apply worker")
def test_an_answer_to_a_worker_that_gives_up_meanwhile_changes_nothing() -> None:
    """Both had checked the same state before: the table ended in Catchup with nobody at work, and all others stood still."""
    store = SlowStore()
    table_states = waiting_board(store)
    gives_up = threading.Thread(target=table_states.move, args=(TABLE, INIT, Actor.TABLE_SYNC))
    gives_up.start()
    assert store.begun.wait(30)
    answered = []

    def answer() -> None:
        answered.append(table_states.move(TABLE, catchup(EndLsn(5)), Actor.APPLY, only_from=SYNC_WAIT))

    answers = threading.Thread(target=answer)
    answers.start()
    store.release.set()
    gives_up.join(30)
    answers.join(30)
    state = table_states.get(TABLE)
    assert state == INIT
    assert answered == [False]


def test_a_move_that_nobody_took_back_is_still_checked() -> None:
    table_states = waiting_board(MemoryStore())
    with pytest.raises(StateError):
        table_states.move(TABLE, catchup(EndLsn(5)), Actor.TABLE_SYNC)
    assert table_states.move(TABLE, catchup(EndLsn(5)), Actor.APPLY, only_from=SYNC_WAIT)


def test_states_of_several_tables_are_recorded_together_and_seen_together() -> None:
    store = MemoryStore()
    table_states = TableStates(store, Progress())
    tables = [TableId(number) for number in range(3)]
    for table in tables:
        table_states.load(table, TableName("public", f"t{table}"), FINISHED_COPY)
    seen: list[set[Phase]] = []
    table_states.listen(lambda: seen.append({state.phase for state in table_states.all().values()}))
    table_states.forget(tables[2])
    seen.clear()
    moved = table_states.move_all(dict.fromkeys(tables, SYNC_WAIT), Actor.TABLE_SYNC, only_from={tables[1]: INIT})
    # One that left, and one that is not where it was expected, are passed over.
    assert moved == {tables[0]}
    table_states.move(tables[1], SYNC_WAIT, Actor.TABLE_SYNC)
    seen.clear()
    table_states.move_all({table: catchup(EndLsn(5)) for table in tables}, Actor.APPLY)
    assert seen == [{Phase.CATCHUP}]


def test_one_transition_that_is_not_allowed_stops_all_of_them() -> None:
    store = MemoryStore()
    table_states = TableStates(store, Progress())
    table_states.load(TableId(1), TableName("public", "a"), FINISHED_COPY)
    table_states.load(TableId(2), TableName("public", "b"), INIT)
    with pytest.raises(StateError):
        table_states.move_all({TableId(1): INIT, TableId(2): FINISHED_COPY}, Actor.TABLE_SYNC)
    assert table_states.get(TableId(1)) == FINISHED_COPY
