from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from headwater.engine.board import Board
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


def waiting_board(store: MemoryStore) -> Board:
    board = Board(store, Progress())
    board.load(TABLE, TableName("public", "orders"), FINISHED_COPY)
    board.move(TABLE, SYNC_WAIT, Actor.TABLE_SYNC)
    return board


def test_an_answer_to_a_worker_that_gives_up_meanwhile_changes_nothing() -> None:
    """Both had checked the same state before: the table ended in Catchup with nobody at work, and all others stood still."""
    store = SlowStore()
    board = waiting_board(store)
    gives_up = threading.Thread(target=board.move, args=(TABLE, INIT, Actor.TABLE_SYNC))
    gives_up.start()
    assert store.begun.wait(30)
    answered = []

    def answer() -> None:
        answered.append(board.move(TABLE, catchup(EndLsn(5)), Actor.APPLY, only_from=SYNC_WAIT))

    answers = threading.Thread(target=answer)
    answers.start()
    store.release.set()
    gives_up.join(30)
    answers.join(30)
    state = board.get(TABLE)
    assert state == INIT
    assert answered == [False]


def test_a_move_that_nobody_took_back_is_still_checked() -> None:
    board = waiting_board(MemoryStore())
    with pytest.raises(StateError):
        board.move(TABLE, catchup(EndLsn(5)), Actor.TABLE_SYNC)
    assert board.move(TABLE, catchup(EndLsn(5)), Actor.APPLY, only_from=SYNC_WAIT)


def test_states_of_several_tables_are_recorded_together_and_seen_together() -> None:
    store = MemoryStore()
    board = Board(store, Progress())
    tables = [TableId(number) for number in range(3)]
    for table in tables:
        board.load(table, TableName("public", f"t{table}"), FINISHED_COPY)
    seen: list[set[Phase]] = []
    board.listen(lambda: seen.append({state.phase for state in board.all().values()}))
    board.forget(tables[2])
    seen.clear()
    moved = board.move_all(dict.fromkeys(tables, SYNC_WAIT), Actor.TABLE_SYNC, only_from={tables[1]: INIT})
    # One that left, and one that is not where it was expected, are passed over.
    assert moved == {tables[0]}
    board.move(tables[1], SYNC_WAIT, Actor.TABLE_SYNC)
    seen.clear()
    board.move_all({table: catchup(EndLsn(5)) for table in tables}, Actor.APPLY)
    assert seen == [{Phase.CATCHUP}]


def test_one_transition_that_is_not_allowed_stops_all_of_them() -> None:
    store = MemoryStore()
    board = Board(store, Progress())
    board.load(TableId(1), TableName("public", "a"), FINISHED_COPY)
    board.load(TableId(2), TableName("public", "b"), INIT)
    with pytest.raises(StateError):
        board.move_all({TableId(1): INIT, TableId(2): FINISHED_COPY}, Actor.TABLE_SYNC)
    assert board.get(TableId(1)) == FINISHED_COPY
