"""The ways a slot can be unfit, each an error with its hint (invariant 10).

After a `LineageLost`, `invalidated_slot_behavior = recreate` may copy all tables again; the others need the operator, or
pass with time.
"""

from __future__ import annotations

from headwater.errors import Retry, SlotError

_RESYNC = "run `headwater resync --all pipeline.toml` to copy the tables again"
_FEEDBACK = "Set hot_standby_feedback = on and primary_slot_name on the standby"
_RECREATE = 'or set invalidated_slot_behavior = "recreate"'


CONFLICTING = "conflicting with recovery"
"""All that version 16 says of a slot on a standby that recovery invalidated; 17 and later give a reason."""


class LineageLost(SlotError):
    """The stream cannot continue from our position: changes after it are lost, or were never made on this server."""


class SlotMissing(LineageLost):
    """Progress was recorded, and the slot does not exist."""


class SlotInvalidated(LineageLost):
    """The server has removed WAL that the slot needs."""


class OtherServer(LineageLost):
    """Progress belongs to another cluster, or lies beyond what this one has written."""


class TimelineLeft(OtherServer):
    """The server is on another timeline, and our progress is not wholly in the history that both timelines share."""


class StandbyBehind(SlotError):
    """The standby has not replayed as far as our progress; earlier it had, or its primary had."""

    default_retry = Retry.TIMED


class SlotBeingSynced(SlotError):
    """A copy that a standby keeps of its primary's slot; it cannot be used before the standby is promoted."""

    default_retry = Retry.TIMED


class SlotNotOurs(SlotError):
    """A slot with our name that is of another kind or database."""


class SlotInUse(SlotError):
    """Another session reads from the slot at this moment."""

    default_retry = Retry.TIMED


def slot_missing(name: str, progress: object, *, promoted: bool = False) -> SlotMissing:
    detail = f"the last recorded position is {progress}; changes after it cannot be read any more"
    advice = "Find out who dropped it"
    if promoted:
        detail += "; the server was promoted since, and its old primary's slot did not come with it"
        advice = (
            "To keep it over the next failover, set failover_slot = true, and sync_replication_slots = on on standbys"
        )
    return SlotMissing(
        f'replication slot "{name}" does not exist', detail=detail, hint=f"{advice}; {_RESYNC}, {_RECREATE}."
    )


def slot_invalidated(
    name: str, wal_status: str | None, reason: str | None, confirmed: object, wal_keep_limit: str
) -> SlotInvalidated:
    status = f"wal_status={wal_status}" + (f", invalidation_reason={reason}" if reason else "")
    advice = {
        None: "Raise max_slot_wal_keep_size",
        "wal_removed": "Raise max_slot_wal_keep_size",
        "idle_timeout": "Raise idle_replication_slot_timeout",
        "wal_level_insufficient": "Set wal_level = logical on the primary",
        "rows_removed": _FEEDBACK,
        CONFLICTING: _FEEDBACK,
    }.get(reason, "Remove the cause")
    return SlotInvalidated(
        f'replication slot "{name}" can no longer serve changes',
        detail=f"Postgres reports {status}; the last confirmed position is {confirmed}; "
        f"max_slot_wal_keep_size is {wal_keep_limit}",
        hint=f"{advice}, then {_RESYNC}, {_RECREATE}.",
    )


def other_system(name: str, expected: str, found: str) -> OtherServer:
    return OtherServer(
        f'replication slot "{name}" belongs to another server',
        detail=f"progress was recorded for system identifier {expected}; this server's is {found}",
        hint="Point pg_connection at the server this pipeline followed; if it was replaced for good, "
        f"{_RESYNC}, {_RECREATE}.",
    )


def ahead_of_server(name: str, progress: object, flush: object) -> OtherServer:
    return OtherServer(
        f'the recorded progress of replication slot "{name}" is ahead of the server',
        detail=f"the recorded position is {progress}, the server has flushed up to {flush}; it was restored from an "
        "older backup, or a standby that lagged behind was promoted",
        hint=f"The lake may have changes that the source has lost: {_RESYNC}, {_RECREATE}.",
    )


def past_the_switch(name: str, progress: object, left: int, ended: object, timeline: int) -> TimelineLeft:
    return TimelineLeft(
        f'the recorded progress of replication slot "{name}" is past the point where the server changed its timeline',
        detail=f"the recorded position is {progress}; the server went from timeline {left} to {timeline} at {ended}: a "
        "standby that lagged behind was promoted, or a backup was restored",
        hint="The lake has changes that this server never had: "
        f"{_RESYNC}, {_RECREATE}. With synchronized_standby_slots on the primary no standby lags behind the lake.",
    )


def unknown_timeline(name: str, recorded: int, timeline: int) -> TimelineLeft:
    return TimelineLeft(
        f'the recorded progress of replication slot "{name}" belongs to another timeline',
        detail=f"it was recorded on timeline {recorded}, which is not in the history of this server's timeline {timeline}",
        hint="Point pg_connection at the server that was promoted last; if this one is to stay, "
        f"{_RESYNC}, {_RECREATE}.",
    )


def slot_made_anew(name: str, progress: object, confirmed: object) -> TimelineLeft:
    return TimelineLeft(
        f'replication slot "{name}" was created after the server was promoted',
        detail=f"it was not synchronized from the old primary and begins at {confirmed}; the last recorded position is "
        f"{progress}, and what was committed between the two would be missing",
        hint="To keep the slot over the next failover, set failover_slot = true, and sync_replication_slots = on on "
        f"standbys; {_RESYNC}, {_RECREATE}.",
    )


def standby_behind(name: str, progress: object, replayed: object) -> StandbyBehind:
    return StandbyBehind(
        f'the standby has not replayed as far as the recorded progress of replication slot "{name}"',
        detail=f"the recorded position is {progress}, the standby has replayed up to {replayed}",
        hint="Wait until it has caught up with its primary: SELECT * FROM pg_stat_wal_receiver on the standby.",
    )


def slot_being_synced(name: str) -> SlotBeingSynced:
    return SlotBeingSynced(
        f"replication slot \"{name}\" is the standby's copy of its primary's slot",
        detail="such a slot serves changes only after the standby was promoted",
        hint="Point pg_connection at the primary, or promote the standby: SELECT pg_promote().",
    )


def wrong_plugin(name: str, slot_type: str | None, plugin: str | None) -> SlotNotOurs:
    found = f"a {slot_type} slot" + (f' with plugin "{plugin}"' if plugin else "")
    return SlotNotOurs(
        f'replication slot "{name}" was not created by Headwater',
        detail=f'expected a logical slot with plugin "pgoutput", found {found}',
        hint="Give the pipeline another id, or drop the slot if it is not needed: SELECT pg_drop_replication_slot(...).",
    )


def wrong_database(name: str, expected: str, found: str | None) -> SlotNotOurs:
    return SlotNotOurs(
        f'replication slot "{name}" belongs to another database',
        detail=f'it was created in "{found}", this pipeline reads "{expected}"; slot names are shared by all databases',
        hint="Give each pipeline of this server its own id.",
    )


def slot_in_use(name: str, pid: int | None) -> SlotInUse:
    return SlotInUse(
        f'replication slot "{name}" is in use',
        detail=f"process {pid} of the server reads from it" if pid is not None else "another session reads from it",
        hint="Stop the other reader; SELECT * FROM pg_stat_replication on the server shows who it is.",
    )
