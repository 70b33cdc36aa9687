"""Table states: one pure table of transitions, with who may make them and what a crash leads to.

No I/O and no clock. `SyncWait` and `Catchup` are kept in memory only; the others are recorded by the store. Every way out
of `Errored` leads through `Init` and a new copy (invariant 15).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from headwater.errors import HeadwaterError, Retry, StateError
from headwater.lsn import EndLsn
from headwater.schema.table import TableId


class Phase(StrEnum):
    INIT = "init"
    DATA_SYNC = "data_sync"
    FINISHED_COPY = "finished_copy"
    SYNC_WAIT = "sync_wait"
    CATCHUP = "catchup"
    SYNC_DONE = "sync_done"
    READY = "ready"
    ERRORED = "errored"


class Actor(StrEnum):
    """Who asks for a transition."""

    PIPELINE = "pipeline"
    TABLE_SYNC = "table sync worker"
    APPLY = "apply worker"
    CATALOG = "look at the catalog"
    """The catalog shows a change of the table that the stream does not: a column, its identity, its place in the publication."""
    USER = "user"


FROM_EVERY_STATE = (Actor.CATALOG, Actor.USER)
"""Who may ask for a new copy at any time."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    kind: Retry
    next_retry: datetime | None = None
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class TableState:
    """A phase with what belongs to it. Make one with the functions below."""

    phase: Phase
    lsn: EndLsn | None = None
    reason: str = ""
    solution: str = ""
    retry_policy: RetryPolicy | None = None
    take_over: bool = False
    """The user asked for a copy that may replace another owner's rows. Kept until that copy is finished."""
    copied: bool = field(default=False, compare=False)
    """Whether a copy of the table was completed before: `table_sync_copy` skips the first one only. Kept with the state; two
    states that differ in it alone are equal."""

    def __str__(self) -> str:
        return f"{self.phase.value}({self.lsn})" if self.lsn is not None else self.phase.value

    @property
    def persisted(self) -> bool:
        return self.phase not in IN_MEMORY_ONLY


INIT = TableState(Phase.INIT)
DATA_SYNC = TableState(Phase.DATA_SYNC)
FINISHED_COPY = TableState(Phase.FINISHED_COPY)
SYNC_WAIT = TableState(Phase.SYNC_WAIT)
READY = TableState(Phase.READY)


def catchup(lsn: EndLsn) -> TableState:
    return TableState(Phase.CATCHUP, lsn=lsn)


def sync_done(lsn: EndLsn) -> TableState:
    return TableState(Phase.SYNC_DONE, lsn=lsn)


def errored(error: HeadwaterError, *, attempts: int = 0, next_retry: datetime | None = None) -> TableState:
    reason = f"{error.message}: {error.detail}" if error.detail else error.message
    policy = RetryPolicy(error.retry, next_retry, attempts)
    return TableState(Phase.ERRORED, reason=reason, solution=error.hint, retry_policy=policy)


BEFORE_THE_COPY_ENDS = frozenset({Phase.INIT, Phase.DATA_SYNC, Phase.ERRORED})


def carried(before: TableState, after: TableState) -> TableState:
    """`after` with what stays with a table until its copy is finished."""
    return replace(after, take_over=after.phase in BEFORE_THE_COPY_ENDS and (after.take_over or before.take_over))


def to_be_copied(before: TableState | None, *, take_over: bool = False) -> TableState:
    """Init, for a table that had this state: that there was a copy before stays on record, so the next one is a whole one."""
    return replace(INIT, take_over=take_over, copied=before is not None and before.copied)


IN_MEMORY_ONLY = frozenset({Phase.SYNC_WAIT, Phase.CATCHUP})

TRANSITIONS: dict[tuple[Phase, Actor], frozenset[Phase]] = {
    (Phase.INIT, Actor.TABLE_SYNC): frozenset({Phase.DATA_SYNC, Phase.ERRORED}),
    (Phase.DATA_SYNC, Actor.TABLE_SYNC): frozenset({Phase.FINISHED_COPY, Phase.ERRORED, Phase.INIT}),
    (Phase.FINISHED_COPY, Actor.TABLE_SYNC): frozenset({Phase.SYNC_WAIT, Phase.ERRORED, Phase.INIT}),
    (Phase.SYNC_WAIT, Actor.TABLE_SYNC): frozenset({Phase.ERRORED, Phase.INIT}),
    (Phase.SYNC_WAIT, Actor.APPLY): frozenset({Phase.CATCHUP}),
    (Phase.CATCHUP, Actor.TABLE_SYNC): frozenset({Phase.SYNC_DONE, Phase.ERRORED, Phase.INIT}),
    (Phase.SYNC_DONE, Actor.APPLY): frozenset({Phase.READY, Phase.ERRORED, Phase.INIT}),
    (Phase.READY, Actor.APPLY): frozenset({Phase.ERRORED, Phase.INIT}),
    # At start, where the destination has lost a table.
    (Phase.SYNC_DONE, Actor.PIPELINE): frozenset({Phase.ERRORED}),
    (Phase.READY, Actor.PIPELINE): frozenset({Phase.ERRORED}),
    (Phase.ERRORED, Actor.PIPELINE): frozenset({Phase.INIT}),
    (Phase.DATA_SYNC, Actor.PIPELINE): frozenset({Phase.INIT}),
    (Phase.FINISHED_COPY, Actor.PIPELINE): frozenset({Phase.INIT}),
    (Phase.SYNC_WAIT, Actor.PIPELINE): frozenset({Phase.INIT}),
    (Phase.CATCHUP, Actor.PIPELINE): frozenset({Phase.INIT}),
    **{(phase, actor): frozenset({Phase.INIT}) for actor in FROM_EVERY_STATE for phase in Phase},
}

AFTER_CRASH: dict[Phase, Phase] = {
    Phase.INIT: Phase.INIT,
    Phase.DATA_SYNC: Phase.INIT,
    Phase.FINISHED_COPY: Phase.INIT,
    # The memory-only phases are found as the last phase that was recorded before them.
    Phase.SYNC_WAIT: Phase.INIT,
    Phase.CATCHUP: Phase.INIT,
    Phase.SYNC_DONE: Phase.SYNC_DONE,
    Phase.READY: Phase.READY,
    Phase.ERRORED: Phase.ERRORED,
}


def check_transition(table_id: TableId, before: TableState, after: TableState, actor: Actor) -> None:
    """Raise StateError unless `actor` may lead the table from one state to the other."""
    if after.phase not in TRANSITIONS.get((before.phase, actor), frozenset()):
        raise StateError(
            f"table {table_id} cannot go from {before} to {after}",
            detail=f"the {actor} asked for it; this transition is not in the table of states",
            hint="This is a defect of Headwater; report it with the log around this line.",
        )


def state_to_json(state: TableState) -> dict[str, Any]:
    policy = state.retry_policy
    return {
        "phase": state.phase.value,
        "lsn": str(state.lsn) if state.lsn is not None else None,
        "reason": state.reason,
        "solution": state.solution,
        "retry": None
        if policy is None
        else {
            "kind": policy.kind.value,
            "next_retry": policy.next_retry.isoformat() if policy.next_retry else None,
            "attempts": policy.attempts,
        },
        "copied": state.copied,
        "take_over": state.take_over,
    }


def state_from_json(value: dict[str, Any]) -> TableState:
    retry = value.get("retry")
    return TableState(
        phase=Phase(value["phase"]),
        lsn=EndLsn.parse(value["lsn"]) if value.get("lsn") else None,
        reason=value.get("reason", ""),
        solution=value.get("solution", ""),
        retry_policy=None
        if retry is None
        else RetryPolicy(
            Retry(retry["kind"]),
            datetime.fromisoformat(retry["next_retry"]) if retry["next_retry"] else None,
            retry["attempts"],
        ),
        # Recorded by a version without this field: a table that was copied is in, or was in, a phase that only a copy leads to.
        copied=value.get("copied", value["phase"] in (Phase.SYNC_DONE, Phase.READY)),
        take_over=value.get("take_over", False),
    )
