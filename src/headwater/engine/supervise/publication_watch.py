"""Looks every few seconds at what the stream does not show: the catalog, and states that the operator has set (invariant 17).

Used by one thread, together with the pool. A look reads and writes nothing (invariant 9); only what it finds leads to writes. The
source or the store being unreachable is logged; the workers wait for them.

What no message of the stream can explain is acted on at once. The rest waits until the stream has passed the position of the
look, and only what it did not explain by then is acted on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headwater.engine.follow.stream_facts import StreamFacts
from headwater.engine.source import Source
from headwater.engine.table_states import TableStates
from headwater.engine.table_sync.pool import TableSyncPool
from headwater.errors import HeadwaterError
from headwater.lsn import ZERO, EndLsn
from headwater.observability.progress import Progress
from headwater.schema.table import TableId
from headwater.source.catalog_look import CatalogLooks, Look
from headwater.source.differences import Difference, differences, gone_leaves, taken_over, unexplained
from headwater.source.fingerprint import Fingerprint
from headwater.source.publication import published_tables
from headwater.source.session import Connection, connect
from headwater.states import Phase

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
_NOTICE_SECONDS = 15.0
_LONGEST_ANSWERS = 5
_SHORT_SECONDS = 0.2
"""A look that takes longer is followed by a pause that is longer by as much: looks take a tenth of a core of the source at most.
One at 10,000 partitions takes 0.3 s."""
_LONGEST_PAUSE_SECONDS = 30.0
_AT_REST = frozenset({Phase.INIT, Phase.ERRORED})
"""A copy that comes takes a fingerprint of its own; an error waits for its own way back."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A look that the stream has not passed yet, and the fingerprints that it is held against."""

    look: Look
    recorded: Mapping[TableId, Fingerprint]


class PublicationWatch:
    def __init__(
        self,
        source: Source,
        table_states: TableStates,
        facts: StreamFacts,
        progress: Progress,
        pool: TableSyncPool,
        looks: CatalogLooks,
        first: Look,
    ) -> None:
        self._source = source
        self._table_states = table_states
        self._facts = facts
        self._progress = progress
        self._pool = pool
        self._looks = looks
        self._pending: _Pending | None = _Pending(first, table_states.fingerprints())
        self._judged: EndLsn | None = None
        self._judged_before = ZERO
        self._seen: Mapping[TableId, Fingerprint] = first.tables
        self._connection: Connection | None = None
        self._next = time.monotonic() + LOOK_SECONDS
        self._last_error = ""

    def look_if_due(self) -> None:
        began, pause = time.monotonic(), LOOK_SECONDS
        try:
            self._report()
            self._judge_if_passed()
            if began < self._next:
                return
            self._look()
            longer = max(1.0, (time.monotonic() - began) / _SHORT_SECONDS)
            pause = min(pause * longer, _LONGEST_PAUSE_SECONDS)
            self._look_at_states()
            self._last_error = ""
        except HeadwaterError as error:
            self.close()
            if error.message != self._last_error:
                self._last_error = error.message
                log.warning("changes of the catalog and of states cannot be seen at the moment: %s", error)
        # From now, not from when it was due: a look that took long must not be followed by the next at once.
        self._next = time.monotonic() + pause

    def settle(self) -> None:
        """At the end of a run: record what the stream has explained, so that the next run need not be in doubt about it."""
        try:
            recorded = self._table_states.fingerprints()
            look = self._looks.look(self._open())
            for table_id, before, now in self._compared(look, recorded):
                if gone := gone_leaves(before, now, look.since):
                    self._say(table_id, gone)
                    self._table_states.reset(table_id)
                elif not unexplained(differences(before, now), self._facts.truncates(table_id)):
                    self._record(table_id, before, now, look.since)
        except HeadwaterError as error:
            log.info("no last look at the catalog: %s", error.message)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _look_at_states(self) -> None:
        for table_id in self._table_states.changed_outside():
            log.warning("table %s: a new copy was asked for", self._table_states.name(table_id))
            self._pool.copy_again(table_id)

    def _open(self) -> Connection:
        if self._connection is None or self._connection.closed:
            settings = self._source.settings
            self._connection = connect(
                settings,
                tcp_user_timeout_seconds=_NOTICE_SECONDS,
                # Of a large catalog; a session that hangs must not be the last to have looked.
                longest_seconds=_LONGEST_ANSWERS * settings.answer_timeout_seconds,
            )
        return self._connection

    # The catalog

    def _look(self) -> None:
        # First: a copy that takes a fingerprint meanwhile has seen more than this look.
        recorded = self._table_states.fingerprints()
        look = self._looks.look(self._open())
        if self._is_other(look):
            self._look_at_members(look)
        self._seen = look.tables
        for table_id, before, now in self._compared(look, recorded):
            found = [*differences(before, now), *gone_leaves(before, now, look.since)]
            if any(difference.storage is None for difference in found):
                self._copy_again(table_id, found)
            elif not found:
                self._record(table_id, before, now, look.since)
        if self._pending is None:
            self._pending = _Pending(look, recorded)

    def _compared(
        self, look: Look, recorded: Mapping[TableId, Fingerprint]
    ) -> Iterator[tuple[TableId, Fingerprint, Fingerprint]]:
        """Tables that are not what is recorded of them, each with both fingerprints."""
        table_states = self._table_states
        for table_id, now in look.tables.items():
            before, state = recorded.get(table_id), table_states.get(table_id)
            if before is None or before is not table_states.fingerprint(table_id) or before == now:
                continue
            if state is not None and state.phase not in _AT_REST and not self._pool.is_to_be_copied(table_id):
                yield table_id, before, now

    def _judge_if_passed(self) -> None:
        pending = self._pending
        if pending is None or not self._facts.has_passed(pending.look.position):
            return
        self._pending = None
        for table_id, before, now in self._compared(pending.look, pending.recorded):
            found = [*differences(before, now), *gone_leaves(before, now, pending.look.since)]
            rest = unexplained(found, self._facts.truncates(table_id))
            if rest:
                self._copy_again(table_id, rest)
            else:
                self._record(table_id, before, now, pending.look.since)
        self._judged, self._judged_before = self._judged_before, pending.look.since

    def _copy_again(self, table_id: TableId, found: list[Difference]) -> None:
        self._say(table_id, found)
        self._pool.copy_again(table_id)

    def _say(self, table_id: TableId, found: list[Difference]) -> None:
        reasons = "; ".join(difference.reason for difference in found)
        log.warning("table %s is copied again: %s", self._table_states.name(table_id), reasons)

    def _record(self, table_id: TableId, before: Fingerprint, now: Fingerprint, since: EndLsn) -> None:
        self._table_states.fingerprinted({table_id: taken_over(before, now)}, only_from={table_id: before})
        self._facts.forget_truncates(table_id, since)

    def _report(self) -> None:
        """What was judged shows in the states: tables that are to be copied again have left theirs."""
        if self._judged is not None and self._pool.is_settled:
            self._progress.judged(self._judged.value)
            self._judged = None

    # Members

    def _is_other(self, look: Look) -> bool:
        if look.tables.keys() != self._pool.tables().keys():
            return True
        return any(look.tables[id] is not known for id, known in self._seen.items() if id in look.tables)

    def _look_at_members(self, look: Look) -> None:
        known = self._pool.tables()
        # Read after the look: one that joined in between is for the next look.
        published = published_tables(self._open(), self._source.publication)
        tables = {table.id: table for table in published if table.id in look.tables}
        for table_id in [table_id for table_id in known if table_id not in look.tables]:
            log.warning("table %s left the publication: its lake table is kept", known[table_id].name)
            self._pool.let_go(table_id)
        for table in tables.values():
            if table.id in known:
                self._pool.refresh(table)
            elif self._pool.take_in(table):
                log.warning("table %s joined the publication: it is copied", table.name)
