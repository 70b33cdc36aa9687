"""Changes that were made while the publication did not exist: the server cannot send them, so every table is copied again."""

from __future__ import annotations

import logging

from headwater.engine.apply.record import ApplyRecord
from headwater.engine.hand_off import Positions
from headwater.engine.run_guard import RunGuard
from headwater.engine.source import Source
from headwater.engine.table_states import TableStates
from headwater.errors import HeadwaterError, Meaning, PublicationMissing, meaning
from headwater.source.publication import publication_options
from headwater.source.session import connect
from headwater.source.slots import advance_slot
from headwater.states import INIT, Phase

log = logging.getLogger(__name__)


class PublicationGap:
    """Used by the apply worker's thread, while it is not connected."""

    def __init__(
        self,
        source: Source,
        slot_name: str,
        positions: Positions,
        table_states: TableStates,
        record: ApplyRecord,
        guard: RunGuard,
    ) -> None:
        self._source = source
        self._slot_name = slot_name
        self._positions = positions
        self._table_states = table_states
        self._record = record
        self._guard = guard

    def pass_over(self, error: PublicationMissing) -> bool:
        """Whether the slot can be followed again; False while the publication does not exist, or the server cannot be asked."""
        try:
            with connect(self._source.settings) as admin:
                publication_options(admin, self._source.publication)
                log.warning(
                    "every table is copied again: changes were made while publication %s did not exist (%s)",
                    self._source.publication,
                    error.message,
                )
                # States first: interrupted after any step, the next run copies everything.
                self._record.states(dict.fromkeys(self._table_states.in_phase(Phase.READY, Phase.SYNC_DONE), INIT))
                self._guard.require_lock()
                position = advance_slot(admin, self._slot_name)
        except HeadwaterError as again:
            if meaning(again) in (Meaning.FATAL, Meaning.STOPPING):
                raise
            log.info("the slot cannot be followed again yet: %s", again.summary)
            return False
        self._record.progress(position)
        self._positions.connected(position)
        return True
