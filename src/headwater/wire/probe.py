"""Asks the server over a new connection what a session does that sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headwater.errors import ConnectError, ConnectionLost, HeadwaterError, LimitReached
from headwater.wire.patience import Verdict

_ACTIVITY = (
    "SELECT a.pid::text AS pid, a.state, a.wait_event, pg_catalog.pg_backend_pid()::text AS own "
    "FROM (SELECT) AS one LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = {pid}"
)
_REFUSES = "FATAL"
_IDLE = ("idle", "idle in transaction", "idle in transaction (aborted)")


def what_became_of(pid: int, ask: Callable[[str], tuple[int, Mapping[str, str | None]]]) -> Verdict:
    """`ask` opens a session on the same server, by the same role, which sees its own sessions' activity; runs the question;
    and returns the number that it was given for the new session, and the answer's row. All in bounded time."""
    try:
        given, row = ask(_ACTIVITY.format(pid=int(pid)))
    except LimitReached:
        return Verdict.AT_WORK  # this machine could not ask
    except (ConnectError, ConnectionLost) as error:
        # A server that refuses a session (too many, starting, stopping) answers; of the other session nothing is known then.
        return Verdict.AT_WORK if _REFUSES in error.detail else Verdict.NO_ANSWER
    except HeadwaterError:
        return Verdict.AT_WORK
    if row["own"] != str(given):
        return Verdict.AT_WORK  # a pooler gives out pids of its own
    if row["pid"] is None:
        return Verdict.GONE
    if row["wait_event"] == "ClientWrite":
        return Verdict.STUCK
    # NULL or "disabled" where the server does not track what sessions do.
    return Verdict.IDLE if row["state"] in _IDLE else Verdict.AT_WORK
