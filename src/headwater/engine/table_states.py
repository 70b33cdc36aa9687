"""The states of all tables as the workers see them: the one place where they change.

States that live in memory only are kept here and nowhere else; all others are recorded by the store before anybody sees
them. Every change is checked against the table of transitions.

What the operator changes in the store while the pipeline runs: only Init counts, which asks for a new copy. The store keeps
such an Init against what a worker records over it, `changed_outside` finds it, and the table is copied again once its worker
has ended. Any other state that is written from outside is ignored and overwritten by the table's next transition.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

from headwater.changes import StreamLeaf
from headwater.config.pipeline import PipelineConfig
from headwater.contracts.stores import PipelineStore
from headwater.engine.retry_times import table_backoff
from headwater.errors import HeadwaterError, Retry
from headwater.lsn import ZERO, EndLsn
from headwater.observability.progress import Progress
from headwater.schema.table import TableId, TableName
from headwater.source.fingerprint import Fingerprint, UnseenLeaf, to_text
from headwater.states import INIT, Actor, Phase, TableState, carried, check_transition, errored

log = logging.getLogger(__name__)


class TableStates:
    def __init__(self, store: PipelineStore, progress: Progress) -> None:
        self._store = store
        self._progress = progress
        self._lock = threading.Lock()
        # Around store and memory together, so that a thread that compares the two never sees half of a change.
        self._recording = threading.RLock()
        self.deciding = threading.RLock()
        """Held by the apply worker while it decides whose changes go into a batch, and by a thread that takes a table from it.
        Taken before any other lock of ours."""
        self._states: dict[TableId, TableState] = {}
        self._names: dict[TableId, TableName] = {}
        self._copied: set[TableId] = set()
        self._fingerprints: dict[TableId, Fingerprint] = {}
        """What the catalog said when each was copied, and since then; none while a table waits for its copy."""
        self._failures: dict[TableId, int] = {}
        self._fresh_streams: dict[TableId, EndLsn] = {}
        self._being_written: frozenset[TableId] = frozenset()
        self.written_at_once = 0
        """How many tables the apply worker's newest batch has."""
        self._listeners: list[Callable[[], None]] = []
        self.timeline: int | None = None
        """The source's, as the apply worker follows it: a position of another one is no place to hand a table over at."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change, from the thread that made it."""
        with self._lock:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def load(
        self, table_id: TableId, name: TableName, state: TableState | None, fingerprint: Fingerprint | None = None
    ) -> None:
        """Take a table in as the store has it; one without a state begins at Init."""
        with self._recording:
            if state is None:
                state = INIT
                self._store.update_table_state(table_id, state)
            with self._lock:
                self._names[table_id], self._states[table_id] = name, state
                if state.copied:
                    self._copied.add(table_id)
                if fingerprint is not None:
                    self._fingerprints[table_id] = fingerprint
                if state.retry_policy is not None:
                    self._failures[table_id] = state.retry_policy.attempts
            self._progress.table_state(table_id, str(name), str(state))
        self._tell()

    def forget(self, table_id: TableId) -> None:
        """From the return of this on no batch is cut with changes of the table; one that is being written may have some."""
        with self.deciding, self._recording:
            with self._lock:
                self._states.pop(table_id, None)
                self._names.pop(table_id, None)
                self._copied.discard(table_id)
                self._fingerprints.pop(table_id, None)
                self._failures.pop(table_id, None)
                self._fresh_streams.pop(table_id, None)
            self._progress.table_removed(table_id)
        self._tell()

    def rename(self, table_id: TableId, name: TableName) -> None:
        with self._recording:
            with self._lock:
                state = self._states.get(table_id)
                if state is None or self._names[table_id] == name:
                    return
                self._names[table_id] = name
            self._progress.table_state(table_id, str(name), str(state))

    def reset(self, table_id: TableId) -> None:
        """Back to Init, whatever the state: the table's worker must have ended. A whole budget of attempts is given."""
        with self.deciding, self._recording:
            with self._lock:
                state = self._states.get(table_id)
                self._failures.pop(table_id, None)
            if state is not None and state.phase is not Phase.INIT:
                asked = self._store.get_table_state(table_id)
                by_user = asked is not None and asked.phase is Phase.INIT
                actor = Actor.USER if by_user else Actor.CATALOG
                wanted = asked is not None and by_user and asked.take_over
                self.move(table_id, replace(INIT, take_over=wanted), actor)

    def changed_outside(self) -> list[TableId]:
        """Tables that are Init in the store, where the operator has set them, and not here. Only reads."""
        with self._recording:
            self._store.load_table_states()
            stored = self._store.get_table_states()
            asked = [table for table, state in stored.items() if state.phase is Phase.INIT]
            with self._lock:
                return [
                    table for table in asked if table in self._states and self._states[table].phase is not Phase.INIT
                ]

    def fingerprinted(
        self,
        fingerprints: Mapping[TableId, Fingerprint],
        *,
        only_from: Mapping[TableId, Fingerprint] = MappingProxyType({}),
    ) -> None:
        """Record what the catalog says of tables, from now on what the next look is held against.

        A table that is not at the fingerprint that `only_from` has for it is passed over.
        """
        with self._recording:
            with self._lock:
                fingerprints = {
                    id: found
                    for id, found in fingerprints.items()
                    if id not in only_from or self._fingerprints.get(id) is only_from[id]
                }
            if not fingerprints:
                return
            self._store.store_table_fingerprints({id: to_text(found) for id, found in fingerprints.items()})
            with self._lock:
                self._fingerprints.update({id: found for id, found in fingerprints.items() if id in self._states})

    def leaves_seen(self, leaves: Iterable[StreamLeaf]) -> None:
        """The stream told changes of these: those that no look has shown yet are put on record, until one does."""
        with self._recording:
            for leaf in leaves:
                known, oid = self.fingerprint(leaf.root_id), leaf.id
                if known is None or oid in {*(part.oid for part in known.parts), *(part.oid for part in known.unseen)}:
                    continue
                # What went before the copy is in no copy.
                if leaf.commit_lsn.value >= known.copied_at:
                    told = UnseenLeaf(oid, leaf.name, leaf.commit_lsn.value)
                    self.fingerprinted({leaf.root_id: replace(known, unseen=(*known.unseen, told))})

    def fingerprint(self, table_id: TableId) -> Fingerprint | None:
        with self._lock:
            return self._fingerprints.get(table_id)

    def fingerprints(self) -> Mapping[TableId, Fingerprint]:
        with self._lock:
            return dict(self._fingerprints)

    def needs_stream_from(self, table_id: TableId, position: EndLsn) -> None:
        """The apply worker's stream must have begun there or later before it takes the table over (see the fingerprint)."""
        with self._lock:
            self._fresh_streams[table_id] = position

    def stream_needed_from(self, tables: Iterable[TableId]) -> EndLsn:
        with self._lock:
            return max((self._fresh_streams.get(table, ZERO) for table in tables), default=ZERO)

    def was_copied(self, table_id: TableId) -> bool:
        """Whether a copy of the table was completed before, in this run or an earlier one."""
        with self._lock:
            return table_id in self._copied

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

    def writing(self, tables: Iterable[TableId]) -> None:
        """The apply worker's batch has changes of these tables; none, once it is written and recorded."""
        with self._lock:
            self._being_written = frozenset(tables)
            self.written_at_once = len(self._being_written) or self.written_at_once

    def is_being_written(self, table_id: TableId) -> bool:
        """Whether the destination may be at work on the table for the apply worker."""
        with self.deciding, self._lock:
            return table_id in self._being_written

    def move(self, table_id: TableId, state: TableState, actor: Actor, *, only_from: TableState | None = None) -> bool:
        """Change a table's state: checked, recorded if it is of the recorded kind, then visible to all.

        With `only_from`, nothing happens unless the table is still in that state: for an answer to another
        worker, which may have given up since it asked. Says whether the state is now the new one.
        """
        expected = {table_id: only_from} if only_from is not None else {}
        return bool(self.move_all({table_id: state}, actor, only_from=expected))

    def move_all(
        self,
        states: Mapping[TableId, TableState],
        actor: Actor,
        *,
        only_from: Mapping[TableId, TableState] = MappingProxyType({}),
    ) -> frozenset[TableId]:
        """Change several tables' states at once: one record, and no reader sees some of them changed and others not.

        Tables that left, or are not where `only_from` has them, are passed over. Returns those that were changed.
        """
        # One change at a time, from the look to the record: two that both passed the check could not both be right.
        with self._recording:
            changes = []
            with self._lock:
                for table_id, state in states.items():
                    before = self._states.get(table_id)
                    if before is None or before != only_from.get(table_id, before):
                        continue
                    check_transition(table_id, before, state, actor)
                    copied = table_id in self._copied or state.phase is Phase.FINISHED_COPY
                    changes.append((table_id, before, replace(carried(before, state), copied=copied)))
            recorded = [(table_id, state) for table_id, _, state in changes if state.persisted]
            if recorded:
                self._store.update_table_states(recorded)
            with self._lock:
                self._states.update({table_id: state for table_id, _, state in changes})
                for table_id, _, state in changes:
                    if state.copied:
                        self._copied.add(table_id)
                    if state.phase is Phase.INIT:
                        self._fingerprints.pop(table_id, None)
            for table_id, before, state in changes:
                log.info("table %s: %s -> %s, by the %s", self.name(table_id), before, state, actor)
                self._progress.table_state(table_id, self.name(table_id), str(state))
        if changes:
            self._tell()
        return frozenset(table_id for table_id, _, _ in changes)

    def fail(self, table_id: TableId, error: HeadwaterError, config: PipelineConfig, actor: Actor) -> None:
        """Record a table's error with its policy: tried again later while the budget lasts, then left to the operator."""
        attempts = self._failures.get(table_id, 0) + 1
        next_retry = None
        if error.retry is Retry.TIMED:
            if attempts > config.table_error_retry_max_attempts:
                error = error.with_retry(Retry.MANUAL)
            else:
                wait = table_backoff(config, attempts)
                next_retry = datetime.now(UTC) + timedelta(seconds=wait.next_seconds())
        self.move(table_id, errored(error, attempts=attempts, next_retry=next_retry), actor)
        # Only now: an error that could not be recorded is recorded again, and is one attempt all the same.
        self._failures[table_id] = attempts

    def succeeded(self, table_id: TableId) -> None:
        """Progress: the budget of attempts is whole again."""
        self._failures.pop(table_id, None)

    def has_failed(self, table_id: TableId) -> bool:
        """Whether the last attempts at the table were errors of its own."""
        return table_id in self._failures

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
