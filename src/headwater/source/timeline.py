"""The server's history as a replication session reports it: which cluster, which timeline, and where earlier ones ended.

Every promotion begins a new timeline. Positions up to where it branched off are shared with the old one; after that, the same
position names different WAL (invariant 10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.contracts.stores import Lineage
from headwater.errors import ProtocolError, ServerError
from headwater.lsn import EndLsn
from headwater.wire.connection import WireConnection


@dataclass(frozen=True, slots=True)
class ServerHistory:
    system_identifier: str
    timeline: int
    flushed: EndLsn
    """On a standby: received, which may be more than is replayed."""
    ends: Mapping[int, EndLsn] = field(default_factory=dict)
    """Where each earlier timeline of this server's past ended; its own is not among them."""

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.system_identifier, self.timeline)


def current_timeline(connection: WireConnection) -> int:
    """One round trip, for callers that only need to know whether it changed."""
    (found,) = connection.query("IDENTIFY_SYSTEM")
    return int(found["timeline"] or 0)


def server_history(connection: WireConnection) -> ServerHistory:
    """Asked on a replication session, which may always ask, on a standby too."""
    (found,) = connection.query("IDENTIFY_SYSTEM")
    timeline = int(found["timeline"] or 0)
    flushed = EndLsn.parse(found["xlogpos"] or "")
    return ServerHistory(str(found["systemid"]), timeline, flushed, _ends(connection, timeline))


def _ends(connection: WireConnection, timeline: int) -> dict[int, EndLsn]:
    if timeline <= 1:
        return {}  # the first timeline has no history, and no history file
    try:
        (file,) = connection.query(f"TIMELINE_HISTORY {timeline}")
    except ServerError:
        # The file does not exist any more: then it cannot be shown that an earlier timeline led to this one.
        return {}
    return parse_history(file["content"] or "")


def parse_history(content: str) -> dict[int, EndLsn]:
    """A history file: a line for each earlier timeline with its number, where it was left, and a reason in words."""
    ends = {}
    for line in content.splitlines():
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) < 2 or not parts[0].isdigit():
            raise ProtocolError("not a timeline history", detail=f"expected a number and a position, found {line!r}")
        ends[int(parts[0])] = EndLsn.parse(parts[1])
    return ends
