"""What the destination has of each table when a run begins, held against what is on record.

Without it a table whose lake table is gone stays Ready until a change comes, and its old rows never come back.
"""

from __future__ import annotations

import logging

from headwater.engine.retry import retrying, waits
from headwater.engine.run import Run
from headwater.states import Actor, Phase

log = logging.getLogger(__name__)


def look_at_destination(run: Run) -> None:
    """A table that the destination does not have as it is on record stops here, and not at its next change.

    By its error's own policy: a destination that lost something, or was set back, is for a person to judge (invariant 5). It
    may be a disk that is not mounted.
    """
    tables = list(run.table_states.in_phase(Phase.READY, Phase.SYNC_DONE))
    found = retrying(
        "looking at the destination's tables",
        lambda: run.destination.missing_tables(tables),
        progress=run.progress,
        pause=run.pause,
        again=waits,
    )
    for table, error in found.items():
        name = run.table_states.name(table)
        log.error("table %s: %s", name, error)
        run.progress.error(f"{name}: {error}")
        run.table_states.fail(table, error.for_table(table), run.config, Actor.PIPELINE)
