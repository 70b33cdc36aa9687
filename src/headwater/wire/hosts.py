"""Several servers: they are tried in order, and the first that is reachable and has the wanted role is taken.

A name with several addresses counts as so many servers: each has its own deadline, and each is asked for its role.

Both ways to connect, our own and psycopg, go through here, so that they end at the same server. After a server that is
unreachable the next one is tried; one that refuses us has answered, which ends the search, as in libpq.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headwater.errors import ConnectError, ConnectionLost, HeadwaterError, LimitReached, Retry
from headwater.wire.settings import ConnectSettings, TargetSessionAttrs
from headwater.wire.sockets import each_address


class _Session(Protocol):
    def close(self) -> None: ...


_S = TypeVar("_S", bound=_Session)

ROLE_QUERY = (
    "SELECT pg_catalog.pg_is_in_recovery()::text AS in_recovery, "
    "pg_catalog.current_setting('transaction_read_only') AS read_only"
)


@dataclass(frozen=True, slots=True)
class ServerRole:
    """What ROLE_QUERY answered."""

    in_recovery: bool
    read_only: bool

    @classmethod
    def parse(cls, in_recovery: str | None, read_only: str | None) -> ServerRole:
        return cls(in_recovery == "true", read_only == "on")

    def serves(self, wanted: TargetSessionAttrs) -> bool:
        match wanted:
            case TargetSessionAttrs.READ_WRITE:
                return not self.read_only
            case TargetSessionAttrs.READ_ONLY:
                return self.read_only
            case TargetSessionAttrs.PRIMARY:
                return not self.in_recovery
            case TargetSessionAttrs.STANDBY:
                return self.in_recovery
        return True

    def __str__(self) -> str:
        return "a standby" if self.in_recovery else "a primary" + (" that is read-only" if self.read_only else "")


def connect_to_first(
    settings: ConnectSettings, open: Callable[[ConnectSettings], _S], ask: Callable[[_S], ServerRole]
) -> _S:
    """A session on the first server that accepts it. `open` is given one server, `ask` runs ROLE_QUERY."""
    hosts = settings.in_a_hurry().each_host()
    passes: tuple[TargetSessionAttrs, ...] = (settings.wanted_session,)
    if settings.wanted_session is TargetSessionAttrs.PREFER_STANDBY:
        passes = (TargetSessionAttrs.STANDBY, TargetSessionAttrs.ANY)
    for wanted in passes:
        failures: list[tuple[ConnectSettings, HeadwaterError]] = []
        # One after the other: a name that is slow to look up delays only what comes after it.
        for server in (address for host in hosts for address in each_address(host)):
            try:
                return _open_if_it_serves(server, wanted, open, ask)
            except LimitReached:
                raise  # ours, and the same for every server
            except (ConnectError, ConnectionLost) as error:
                failures.append((server, error))
    if len(failures) == 1:
        raise failures[0][1]
    raise _none_serves(settings, failures) from failures[-1][1]


def _open_if_it_serves(
    server: ConnectSettings,
    wanted: TargetSessionAttrs,
    open: Callable[[ConnectSettings], _S],
    ask: Callable[[_S], ServerRole],
) -> _S:
    session = open(server)
    if wanted is TargetSessionAttrs.ANY:
        return session
    try:
        role = ask(session)
        if role.serves(wanted):
            return session
    except BaseException:
        session.close()
        raise
    session.close()
    raise ConnectError(
        f"server at {server.address} is {role}",
        detail=f"target_session_attrs is {wanted}",
        hint="Name a server of that kind in host, or change target_session_attrs. If a failover is under way, no action is "
        "needed: this is retried.",
    )


def _none_serves(settings: ConnectSettings, failures: list[tuple[ConnectSettings, HeadwaterError]]) -> ConnectError:
    reasons = [_reason(server, error) for server, error in failures]
    what = "servers" if "," in settings.host else "addresses of"
    return ConnectError(
        f"none of the {what} {settings.address} can be used",
        detail="; ".join(reasons),
        hint="Check host and port of each, that one of them runs and is reachable from this machine, and "
        "target_session_attrs.",
        retry=Retry.TIMED if any(error.retry is Retry.TIMED for _, error in failures) else Retry.NEVER,
    )


def _reason(server: ConnectSettings, error: HeadwaterError) -> str:
    said = f"{error.message} ({error.detail})" if error.detail else error.message
    return f"{server.hostaddr}: {said}" if server.hostaddr not in (None, server.host) else said
