"""The ways a slot can be unfit, each an error with its hint (invariant 10).

`LineageLost` is what `invalidated_slot_behavior = recreate` may mend by copying again; the others want a person,
or time.
"""

from __future__ import annotations

from headwater.errors import Retry, SlotError

_RESYNC = "run `headwater resync --all pipeline.toml` to copy the tables again"
_RECREATE = 'or set invalidated_slot_behavior = "recreate"'


class LineageLost(SlotError):
    """The stream cannot go on from where we are: changes between are gone, or were never made on this server."""


class SlotMissing(LineageLost):
    """Progress was recorded, and the slot is not there."""


class SlotInvalidated(LineageLost):
    """The server has let go of WAL that the slot needs."""


class OtherServer(LineageLost):
    """Progress belongs to another cluster, or lies beyond what this one has written."""


class SlotNotOurs(SlotError):
    """A slot with our name that is of another kind or database."""


class SlotInUse(SlotError):
    """Somebody reads from the slot at this moment."""

    default_retry = Retry.TIMED


def slot_missing(name: str, progress: object) -> SlotMissing:
    return SlotMissing(
        f'replication slot "{name}" does not exist',
        detail=f"the last recorded position is {progress}; changes after it cannot be read any more",
        hint=f"Find out who dropped it, then {_RESYNC}, {_RECREATE}.",
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
    }.get(reason, "See to the reason")
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
        hint=f"Point pg_connection at the server this pipeline followed; if it was replaced for good, {_RESYNC}.",
    )


def ahead_of_server(name: str, progress: object, flush: object) -> OtherServer:
    return OtherServer(
        f'the progress behind replication slot "{name}" lies ahead of the server',
        detail=f"the recorded position is {progress}, the server has flushed up to {flush}; it was restored from an "
        "older backup, or a standby that lagged behind was promoted",
        hint=f"Changes the lake has may be gone from the source: {_RESYNC}, {_RECREATE}.",
    )


def wrong_plugin(name: str, slot_type: str | None, plugin: str | None) -> SlotNotOurs:
    found = f"a {slot_type} slot" + (f' with plugin "{plugin}"' if plugin else "")
    return SlotNotOurs(
        f'replication slot "{name}" is not one of ours',
        detail=f'expected a logical slot with plugin "pgoutput", found {found}',
        hint="Give the pipeline another id, or drop the slot if nobody needs it: SELECT pg_drop_replication_slot(...).",
    )


def wrong_database(name: str, expected: str, found: str | None) -> SlotNotOurs:
    return SlotNotOurs(
        f'replication slot "{name}" belongs to another database',
        detail=f'it was made in "{found}", this pipeline reads "{expected}"; slot names are shared by all databases',
        hint="Give each pipeline of this server its own id.",
    )


def slot_in_use(name: str, pid: int | None) -> SlotInUse:
    return SlotInUse(
        f'replication slot "{name}" is in use',
        detail=f"process {pid} of the server reads from it" if pid is not None else "another session reads from it",
        hint="Stop the other reader; SELECT * FROM pg_stat_replication on the server shows who it is.",
    )
