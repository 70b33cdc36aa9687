"""What a running pipeline is doing, as facts that the engine reports and others read.

Depends on no other package: tables are numbers with names, states are words. Every method may be called from any thread,
returns at once and never raises, so that reporting can't disturb the work. Readers take a `snapshot()`, or wait for one that
meets a condition.

Durations are measured with a monotonic clock. The wall clock is read once for each batch: how old its newest change was.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

RATE_WINDOW_SECONDS = 5.0
KEPT_ERRORS = 20
CONTACT_SECONDS = 5.0
"""The server is asked every second: one that has not answered for so long counts as unreachable."""


@dataclass(frozen=True, slots=True)
class TableProgress:
    """One table, as last reported."""

    id: int
    name: str
    state: str
    copying: bool = False
    copy_fraction: float = 0.0
    estimated_rows: int = 0
    estimated_bytes: int = 0
    copied_rows: int = 0
    copy_seconds: float = 0.0
    missed_changes: int = 0
    """Updates and deletes that found no row in the destination: for an exact mirror there are none."""


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """Everything at one moment. Positions are WAL positions as numbers."""

    tables: tuple[TableProgress, ...] = ()
    changes: int = 0
    changes_per_second: float = 0.0
    batches: int = 0
    received: int = 0
    confirmed: int = 0
    server: int = 0
    """The furthest position that the server has reported: asked for every second, and seen in the stream."""
    lag_seconds: float = 0.0
    """While the server is unreachable, at least the time since its last answer: what was committed since is unknown."""
    no_contact_seconds: float | None = None
    """How long the server has not answered; None while it does. Lag in bytes is then what is known, and may be more."""
    waiting: str | None = None
    judged: int = 0
    """Every change of the catalog before this position was explained or acted on, and the states show it."""
    hand_offs: int = 0
    """How often the apply worker paused to take tables over."""
    longest_pause_seconds: float = 0.0
    """The longest of these: what a table's hand-off costs all others."""
    errors: tuple[str, ...] = ()

    @property
    def lag_bytes(self) -> int:
        """From what is confirmed to where the server is, as far as that is known."""
        return max(0, self.server - self.confirmed) if self.confirmed else 0

    @property
    def copied_rows(self) -> int:
        return sum(table.copied_rows for table in self.tables)

    def states(self) -> dict[str, str]:
        return {table.name: table.state for table in self.tables}


@dataclass(slots=True)
class _Rate:
    """Changes of the last few seconds."""

    window: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, count: int) -> None:
        self.window.append((now, count))
        self.at(now)

    def at(self, now: float) -> float:
        while self.window and self.window[0][0] < now - RATE_WINDOW_SECONDS:
            self.window.popleft()
        return sum(count for _, count in self.window) / RATE_WINDOW_SECONDS


class Progress:
    """The engine's side and the reader's side of one run."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] | None = None
    ) -> None:
        """`wall_clock` is the one that commit times are compared with; by default the machine's, or `clock` if that is given."""
        self._clock = clock
        self._wall_clock = wall_clock or (time.time if clock is time.monotonic else clock)
        self._changed = threading.Condition()
        self._tables: dict[int, TableProgress] = {}
        self._now = ProgressSnapshot()
        self._rate = _Rate()
        self._waits: dict[object, str] = {}
        # On `clock`, all three.
        self._newest_commit_at: float | None = None
        self._caught_up_at: float | None = None
        self._contact_at: float | None = None

    # The engine's side.

    def table_state(self, table_id: int, name: str, state: str) -> None:
        with self._changed:
            before = self._tables.get(table_id)
            base = before if before is not None else TableProgress(table_id, name, state)
            self._tables[table_id] = replace(base, name=name, state=state)
            self._changed.notify_all()

    def table_removed(self, table_id: int) -> None:
        with self._changed:
            self._tables.pop(table_id, None)
            self._changed.notify_all()

    def copy_started(self, table_id: int, estimated_rows: int, estimated_bytes: int) -> None:
        self._copy(
            table_id,
            copying=True,
            copy_fraction=0.0,
            copied_rows=0,
            estimated_rows=estimated_rows,
            estimated_bytes=estimated_bytes,
        )

    def copy_advanced(self, table_id: int, fraction: float) -> None:
        self._copy(table_id, copy_fraction=min(1.0, max(0.0, fraction)))

    def copy_finished(self, table_id: int, rows: int, seconds: float) -> None:
        self._copy(table_id, copying=False, copy_fraction=1.0, copied_rows=rows, copy_seconds=seconds)

    def _copy(self, table_id: int, **changes: float) -> None:
        with self._changed:
            base = self._tables.get(table_id)
            if base is None:
                return  # removed while its copy was still under way: a report must not bring it back
            self._tables[table_id] = replace(base, **changes)  # type: ignore[arg-type]
            self._changed.notify_all()

    def batch_applied(self, changes: int, tables: int, seconds: float, newest_commit_time: float) -> None:
        """A batch is durable in the destination. `newest_commit_time` is the source's, in seconds since 1970."""
        with self._changed:
            now = self._clock()
            self._rate.add(now, changes)
            committed_at = now - max(0.0, self._wall_clock() - newest_commit_time)
            self._newest_commit_at = max(committed_at, self._newest_commit_at or committed_at)
            self._now = replace(self._now, changes=self._now.changes + changes, batches=self._now.batches + 1)
            self._changed.notify_all()

    def position(self, received: int, confirmed: int, server: int) -> None:
        """How far the stream was read, how far it is durable and confirmed, and how far the server is at least."""
        with self._changed:
            self._now = replace(self._now, received=received, confirmed=confirmed, server=max(server, self._now.server))
            self._note_if_caught_up()
            self._changed.notify_all()

    def server_at(self, position: int) -> None:
        """The server reported its position. Taken as it is: after a failover the new server may be behind the old one."""
        with self._changed:
            now = self._now
            self._contact_at = self._clock()
            self._now = replace(now, server=max(position, now.received, now.confirmed))
            self._note_if_caught_up()
            self._changed.notify_all()

    def _note_if_caught_up(self) -> None:
        if self._now.confirmed >= self._now.server:
            self._caught_up_at = self._clock()

    def waiting(self, what: str | None, who: object = None) -> None:
        """A worker waits for a reason, or continues (None). `who` keeps the reasons of several workers apart."""
        with self._changed:
            if what is None:
                self._waits.pop(who, None)
            else:
                self._waits[who] = what
            reasons = "; ".join(dict.fromkeys(self._waits.values()))
            if reasons != (self._now.waiting or ""):
                self._now = replace(self._now, waiting=reasons or None)
                self._changed.notify_all()

    def missed(self, table_id: int, count: int) -> None:
        """So many updates and deletes of a table found no row."""
        with self._changed:
            base = self._tables.get(table_id)
            if base is not None:
                self._tables[table_id] = replace(base, missed_changes=base.missed_changes + count)
                self._changed.notify_all()

    def judged(self, position: int) -> None:
        """The catalog was looked at, and the stream has come past that look."""
        with self._changed:
            self._now = replace(self._now, judged=max(self._now.judged, position))
            self._changed.notify_all()

    def handed_over(self, pause_seconds: float) -> None:
        """The apply worker took tables over, and paused for so long."""
        with self._changed:
            longest = max(self._now.longest_pause_seconds, pause_seconds)
            self._now = replace(self._now, hand_offs=self._now.hand_offs + 1, longest_pause_seconds=longest)
            self._changed.notify_all()

    def error(self, text: str) -> None:
        with self._changed:
            self._now = replace(self._now, errors=(*self._now.errors, text)[-KEPT_ERRORS:])
            self._changed.notify_all()

    # The reader's side.

    def snapshot(self) -> ProgressSnapshot:
        with self._changed:
            return self._snapshot()

    def wait_for(self, condition: Callable[[ProgressSnapshot], bool], timeout: float | None = None) -> bool:
        """Wait until a report makes the condition true; False once `timeout` seconds have passed without it."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._snapshot()), timeout)

    def _snapshot(self) -> ProgressSnapshot:
        now = self._clock()
        return replace(
            self._now,
            tables=tuple(sorted(self._tables.values(), key=lambda table: table.name)),
            changes_per_second=self._rate.at(now),
            lag_seconds=self._lag_seconds(now),
            no_contact_seconds=self._no_contact_seconds(now),
        )

    def _lag_seconds(self, now: float) -> float:
        """Zero when caught up, else the time since we last were, or since the newest applied change was committed.

        The smaller of the two: after an idle hour the newest commit is an hour old, but the lag is not.
        """
        unknown = self._no_contact_seconds(now) or 0.0
        if not self._now.confirmed or self._now.confirmed >= self._now.server:
            return unknown
        since = [moment for moment in (self._caught_up_at, self._newest_commit_at) if moment is not None]
        return max(0.0, unknown, now - max(since)) if since else unknown

    def _no_contact_seconds(self, now: float) -> float | None:
        if self._contact_at is None or now - self._contact_at <= CONTACT_SECONDS:
            return None
        return now - self._contact_at
