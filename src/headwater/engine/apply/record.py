"""What the apply worker records: progress, states of tables, errors. Each is tried until it succeeds, under the run's lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from headwater.changes import StreamLeaf
from headwater.config.pipeline import PipelineConfig
from headwater.contracts.stores import APPLY, PipelineStore
from headwater.engine.apply.slot import ApplySlot
from headwater.engine.hand_off import ApplyHandOff
from headwater.engine.run_guard import RunGuard
from headwater.engine.table_states import TableStates
from headwater.errors import HeadwaterError
from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.states import Actor, Phase, TableState

log = logging.getLogger(__name__)


class ApplyRecord:
    """Used by the apply worker's thread."""

    def __init__(
        self,
        config: PipelineConfig,
        store: PipelineStore,
        table_states: TableStates,
        slot: ApplySlot,
        hand_off: ApplyHandOff,
        guard: RunGuard,
    ) -> None:
        self._config = config
        self._store = store
        self._table_states = table_states
        self._slot = slot
        self._hand_off = hand_off
        self._guard = guard

    def progress(self, position: EndLsn) -> None:
        def upsert() -> None:
            self._slot.follow_timeline()
            self._store.upsert_replication_progress(APPLY, position)

        self._until_recorded("progress", upsert)
        self._hand_off.recorded(position)

    def states(
        self, states: Mapping[TableId, TableState], only_from: Mapping[TableId, TableState] = MappingProxyType({})
    ) -> None:
        def move() -> None:
            self._table_states.move_all(states, Actor.APPLY, only_from=only_from)

        self._until_recorded("table states", move)

    def leaves(self, leaves: Iterable[StreamLeaf]) -> None:
        """Before anything of their batch is recorded: once progress is past them, no other source tells of a dropped leaf."""
        self._until_recorded("partitions", lambda: self._table_states.leaves_seen(leaves))

    def failed(self, table: TableId, error: HeadwaterError) -> None:
        """Before anything of the table's batch is recorded: once progress is past its changes, only a new copy has them."""
        table_states, error = self._table_states, error.for_table(table)
        log.error("table %s: %s", table_states.name(table), error)
        self._guard.progress.error(f"{table_states.name(table)}: {error}")
        with table_states.deciding:
            # A table that is to be copied again, or that left while its batch was written, needs no error.
            if table in table_states.in_phase(Phase.READY, Phase.SYNC_DONE):
                self._until_recorded(
                    "a table's error", lambda: table_states.fail(table, error, self._config, Actor.APPLY)
                )

    def _until_recorded(self, what: str, record: Callable[[], None]) -> None:
        def held() -> None:
            self._guard.require_lock()
            record()

        self._guard.retrying(f"recording {what}", held)
