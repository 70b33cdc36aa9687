"""The states of all tables as the workers see them: the one place where they change.

States that live in memory only are kept here and nowhere else; all others are recorded by the store before anybody sees
them. Every change is checked against the table of transitions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from headwater.config.pipeline import PipelineConfig
from headwater.contracts.stores import PipelineStore
from headwater.engine.retry import Backoff
from headwater.errors import HeadwaterError, Retry
from headwater.observability.progress import Progress
from headwater.schema.table import TableId, TableName
from headwater.states import INIT, Actor, Phase, TableState, check_transition, errored

log = logging.getLogger(__name__)


class Board:
    def __init__(self, store: PipelineStore, progress: Progress) -> None:
        self._store = store
        self._progress = progress
        self._lock = threading.Lock()
        self._moving = threading.Lock()
        """Held from the check to the change: of two workers that move a table at once, the second sees the first's state."""
        self._states: dict[TableId, TableState] = {}
        self._names: dict[TableId, TableName] = {}
        self._failures: dict[TableId, int] = {}
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change, from the thread that made it."""
        with self._lock:
            self._listeners.append(listener)

    def load(self, table_id: TableId, name: TableName, state: TableState | None) -> None:
        """Take a table in as the store has it; one without a state begins at Init."""
        if state is None:
            state = INIT
            self._store.update_table_state(table_id, state)
        with self._lock:
            self._names[table_id], self._states[table_id] = name, state
            if state.retry_policy is not None:
                self._failures[table_id] = state.retry_policy.attempts
        self._progress.table_state(table_id, str(name), str(state))
        self._tell()

    def forget(self, table_id: TableId) -> None:
        with self._lock:
            self._states.pop(table_id, None)
            self._names.pop(table_id, None)
        self._progress.table_removed(table_id)
        self._tell()

    def get(self, table_id: TableId) -> TableState | None:
        with self._lock:
            return self._states.get(table_id)

    def name(self, table_id: TableId) -> str:
        with self._lock:
            return str(self._names.get(table_id, table_id))

    def all(self) -> Mapping[TableId, TableState]:
        with self._lock:
            return dict(self._states)

    def in_phase(self, *phases: Phase) -> dict[TableId, TableState]:
        with self._lock:
            return {table: state for table, state in self._states.items() if state.phase in phases}

    def move(self, table_id: TableId, state: TableState, actor: Actor, *, only_from: TableState | None = None) -> bool:
        """Change a table's state: checked, recorded if it is of the recorded kind, then visible to all.

        With `only_from`, nothing happens unless the table is still in that state: for an answer to what somebody else
        asked, who may have given up meanwhile. Says whether the state is now the new one.
        """
        with self._moving:
            before = self.get(table_id)
            if before is None or (only_from is not None and before != only_from):
                return False
            check_transition(table_id, before, state, actor)
            if state.persisted:
                self._store.update_table_state(table_id, state)
            with self._lock:
                if table_id not in self._states:
                    return False
                self._states[table_id] = state
        log.info("table %s: %s -> %s", self.name(table_id), before, state)
        self._progress.table_state(table_id, self.name(table_id), str(state))
        self._tell()
        return True

    def fail(self, table_id: TableId, error: HeadwaterError, config: PipelineConfig, actor: Actor) -> None:
        """Record a table's error with its policy: tried again later while the budget lasts, then left to a person."""
        attempts = self._failures.get(table_id, 0) + 1
        next_retry = None
        if error.retry is Retry.TIMED:
            if attempts > config.table_error_retry_max_attempts:
                error.retry = Retry.MANUAL
            else:
                wait = Backoff(config.table_error_retry_delay_ms / 1000, most_seconds=3600)
                wait.attempts = attempts - 1
                next_retry = datetime.now(UTC) + timedelta(seconds=wait.next_seconds())
        self.move(table_id, errored(error, attempts=attempts, next_retry=next_retry), actor)
        # Only now: an error that could not be recorded is recorded again, and is one attempt all the same.
        self._failures[table_id] = attempts

    def succeeded(self, table_id: TableId) -> None:
        """Progress: the budget of attempts is whole again."""
        self._failures.pop(table_id, None)

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
