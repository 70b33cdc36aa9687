"""May the stream continue from this slot? And which transactions block the creation of one?

Progress never moves back, and a lost slot is never hidden (invariant 10): each way in which slot, progress and
server disagree is an error of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headwater.contracts.stores import Lineage
from headwater.lsn import EndLsn
from headwater.source.server import ServerFacts
from headwater.source.session import Connection, fetch_all
from headwater.source.slot_errors import (
    ahead_of_server,
    other_system,
    past_the_switch,
    slot_being_synced,
    slot_in_use,
    slot_invalidated,
    slot_made_anew,
    slot_missing,
    standby_behind,
    unknown_timeline,
    wrong_database,
    wrong_plugin,
)
from headwater.source.slots import PLUGIN, SlotFacts
from headwater.source.timeline import ServerHistory


class SlotVerdict(StrEnum):
    CREATE = "create"
    RESUME = "resume"


def check_apply_slot(
    facts: SlotFacts,
    progress: EndLsn | None,
    server: ServerFacts,
    flush: EndLsn,
    history: ServerHistory,
    recorded: Lineage | None = None,
) -> SlotVerdict:
    """Whether to create the slot or to continue with it; raises a SlotError for everything else.

    `progress` is the furthest position on record: the apply worker's, or a watermark's if that is further. `recorded` is
    whose positions these are; None where nothing was recorded yet.
    """
    if recorded is not None and recorded.system_identifier != history.system_identifier:
        raise other_system(facts.name, recorded.system_identifier, history.system_identifier)
    switched = None
    if recorded is not None and recorded.timeline != history.timeline and progress is not None:
        switched = _switch_point(facts.name, progress, history, recorded.timeline)
    if progress is not None and progress > flush:
        raise (standby_behind if server.in_recovery else ahead_of_server)(facts.name, progress, flush)
    if not facts.exists:
        if progress is not None:
            raise slot_missing(facts.name, progress, promoted=switched is not None)
        return SlotVerdict.CREATE
    _check_kind(facts, server)
    if facts.synced and server.in_recovery:
        raise slot_being_synced(facts.name)
    if switched is not None and progress is not None and not facts.synced and _is_new(facts, progress, switched):
        raise slot_made_anew(facts.name, progress, facts.confirmed_flush)
    if facts.active_pid is not None:
        raise slot_in_use(facts.name, facts.active_pid)
    return SlotVerdict.RESUME


def _switch_point(name: str, progress: EndLsn, history: ServerHistory, recorded: int) -> EndLsn:
    """Where the server left the recorded timeline. The pipeline continues only if all its positions lie before that point."""
    ended = history.ends.get(recorded)
    if ended is None:
        raise unknown_timeline(name, recorded, history.timeline)
    if progress > ended:
        raise past_the_switch(name, progress, recorded, ended, history.timeline)
    return ended


def _is_new(facts: SlotFacts, progress: EndLsn, switched: EndLsn) -> bool:
    """Made after the promotion, so that what was committed between our progress and its beginning would be missing.

    A slot at a position before the switch was already on the standby: it is our own, if we followed the standby, or a copy
    that another tool kept up to date.
    """
    return facts.confirmed_flush is None or facts.confirmed_flush > max(progress, switched)


def _check_kind(facts: SlotFacts, server: ServerFacts) -> None:
    if facts.slot_type != "logical" or facts.plugin != PLUGIN:
        raise wrong_plugin(facts.name, facts.slot_type, facts.plugin)
    if facts.database != server.database:
        raise wrong_database(facts.name, server.database, facts.database)
    if facts.invalidated:
        raise slot_invalidated(
            facts.name, facts.wal_status, facts.invalidation_reason, facts.confirmed_flush, facts.wal_keep_limit
        )


@dataclass(frozen=True, slots=True)
class Blocker:
    """A transaction that must end before a slot can be made. Never shows what it runs."""

    pid: int | None
    gid: str | None
    age_seconds: float | None
    description: str

    def __str__(self) -> str:
        age = f", open for {self.age_seconds:.0f} s" if self.age_seconds is not None else ""
        return f"{self.description}{age}"


# Only transactions that have written hold a transaction id, and only these are waited for. pg_locks shows their
# holders to every role; pg_stat_activity hides other roles' details from one without pg_read_all_stats: NULL.
_OPEN = """
SELECT l.pid, extract(epoch FROM clock_timestamp() - a.xact_start)::float8, a.usename::text, a.datname::text,
       nullif(a.application_name, ''), a.state
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
  AND l.pid IS NOT NULL AND l.pid <> pg_backend_pid()
GROUP BY l.pid, 2, 3, 4, 5, 6
ORDER BY 2 DESC NULLS LAST
"""
_PREPARED = """
SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8, owner::text, database::text
FROM pg_prepared_xacts ORDER BY 2 DESC
"""


def blockers(connection: Connection) -> list[Blocker]:
    """The transactions that block the creation of a slot now; prepared ones first, of each kind the oldest first."""
    found = []
    for gid, age, owner, database in fetch_all(connection, _PREPARED, doing="listing prepared transactions"):
        described = f'prepared transaction "{gid}" of role "{owner}" in database "{database}"'
        found.append(Blocker(None, gid, age, described))
    for pid, age, role, database, application, state in fetch_all(connection, _OPEN, doing="listing open transactions"):
        parts = [f'role "{role}"' if role else "", f'database "{database}"' if database else ""]
        parts += [f'application "{application}"' if application else "", state or ""]
        known = ", ".join(part for part in parts if part)
        found.append(Blocker(pid, None, age, f"process {pid} ({known})" if known else f"process {pid}"))
    return found
