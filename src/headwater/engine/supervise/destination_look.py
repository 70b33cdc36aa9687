"""What the destination has of each table when a run begins, compared with what is on record.

Without it a table whose lake table is gone stays Ready until a change comes, and its old rows never come back.
"""

from __future__ import annotations

import logging

from headwater.config.pipeline import PipelineConfig
from headwater.contracts.destination import Destination
from headwater.engine.retry import waits
from headwater.engine.run_guard import RunGuard
from headwater.engine.table_states import TableStates
from headwater.states import Actor, Phase

log = logging.getLogger(__name__)


def look_at_destination(
    config: PipelineConfig, destination: Destination, table_states: TableStates, guard: RunGuard
) -> None:
    """A table that the destination does not have as it is on record stops here, and not at its next change.

    By its error's own policy: where a destination lost something, or was set back, the operator decides (invariant 5). It
    may be a disk that is not mounted.
    """
    tables = list(table_states.in_phase(Phase.READY, Phase.SYNC_DONE))
    found = guard.retrying(
        "looking at the destination's tables", lambda: destination.missing_tables(tables), again=waits
    )
    for table, error in found.items():
        name = table_states.name(table)
        log.error("table %s: %s", name, error)
        guard.progress.error(f"{name}: {error}")
        table_states.fail(table, error.for_table(table), config, Actor.PIPELINE)
