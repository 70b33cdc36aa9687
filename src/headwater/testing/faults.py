"""Fault points: a process that dies, as by a power cut, at the moment a table reaches a state.

For a pipeline in a process of its own, which is killed by SIGKILL: nothing is flushed, closed or rolled back. The tests check
that a new run continues correctly from what is left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from headwater.observability.progress import Progress
from headwater.schema.table import TableId
from headwater.states import Phase, TableState
from headwater.store.postgres import PostgresStore
from headwater.wire.settings import ConnectSettings


class Moment(StrEnum):
    BEFORE = "before"
    """What leads to the state is done, and the state is not recorded yet."""
    AFTER = "after"
    """The state has just been reached: recorded, unless it is kept in memory only, and not seen by any other thread yet."""


@dataclass(frozen=True, slots=True)
class FaultPoint:
    table_id: TableId
    phase: Phase
    moment: Moment = Moment.AFTER

    def store(self, settings: ConnectSettings, pipeline_id: int) -> PostgresStore:
        """A store that is one of the two places to die at."""
        if self.moment is Moment.BEFORE:
            return _DyingStore(settings, pipeline_id, self)
        return PostgresStore(settings, pipeline_id)

    def progress(self) -> Progress:
        """Progress that is the other place: it is reported each state, also those that are never recorded in a store."""
        return _DyingProgress(self) if self.moment is Moment.AFTER else Progress()


def die() -> None:
    """At once, and for certain."""
    os.kill(os.getpid(), signal.SIGKILL)


class _DyingStore(PostgresStore):
    def __init__(self, settings: ConnectSettings, pipeline_id: int, point: FaultPoint) -> None:
        super().__init__(settings, pipeline_id)
        self._point = point

    def update_table_states(self, updates: Sequence[tuple[TableId, TableState]]) -> None:
        for table_id, state in updates:
            if table_id == self._point.table_id and state.phase is self._point.phase:
                die()
        super().update_table_states(updates)


class _DyingProgress(Progress):
    def __init__(self, point: FaultPoint) -> None:
        super().__init__()
        self._point = point

    def table_state(self, table_id: int, name: str, state: str) -> None:
        if table_id == self._point.table_id and state.partition("(")[0] == self._point.phase.value:
            die()
        super().table_state(table_id, name, state)
