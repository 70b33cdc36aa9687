"""How long hand-offs hold up the changes of other tables: measured, and shown while it lasts."""

from __future__ import annotations

import time

from headwater.engine.hand_off import States, in_phase
from headwater.engine.table_states import TableStates
from headwater.observability.progress import Progress
from headwater.states import Phase


class HandOffPause:
    """Used by the apply worker's thread."""

    def __init__(self, table_states: TableStates, progress: Progress) -> None:
        self._table_states = table_states
        self._progress = progress
        self._lasts = False
        self._held_up_since: float | None = None

    def look(self, states: States, *, due: bool) -> None:
        """`due` says that a batch would be begun now, were it not for the hand-off: from then on it holds changes up."""
        waiting = in_phase(states, Phase.CATCHUP)
        if waiting:
            self._lasts = True
            if due and self._held_up_since is None and in_phase(states, Phase.READY, Phase.SYNC_DONE):
                self._held_up_since = time.monotonic()
                names = sorted(self._table_states.name(table) for table in waiting)
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                self._progress.waiting(f"the copy of {', '.join(names[:3])}{more} to catch up")
        elif self._lasts:
            since, self._held_up_since, self._lasts = self._held_up_since, None, False
            self._progress.handed_over(time.monotonic() - since if since is not None else 0.0)
            if since is not None:
                self._progress.waiting(None)
