"""From the copies to the hand-off: a worker follows its own slot for all its tables, comes close, asks, and hands over.

It comes close to the server's position before it asks, so that the apply worker's pause is short. Tables that rest are handed
over all at once; busy ones a few at a time, and while the apply worker stands still, nothing is written but what it waits
for. What is written here is durable before the slot's position is confirmed (invariant 2).
"""

from __future__ import annotations

import math
import time

from headwater.engine.bell import Bell
from headwater.engine.ownership import SyncOwnership, needs_text
from headwater.engine.run import Run
from headwater.engine.slot_stream import SlotStream
from headwater.engine.sync_slot import SyncSlot
from headwater.engine.sync_tables import StartAgain, SyncTable, SyncTables
from headwater.engine.sync_write import SyncWrite
from headwater.errors import HeadwaterError, ValueOutOfRange
from headwater.events import EventBatch
from headwater.lsn import EndLsn
from headwater.schema.table import TableId
from headwater.source.server import flush_lsn
from headwater.source.session import Connection
from headwater.states import SYNC_WAIT, Actor, Phase, sync_done

_CLOSE_BYTES = 1 << 20
"""So near to the server's position that the rest is a matter of milliseconds."""
_STILL_GAINING = 0.7
"""Under steady traffic the distance shrinks to what is committed during one write, and no further: then is the time to ask."""
_BUSY_AT_ONCE = 4
"""As many as a destination may be hoped to write side by side: the apply worker stands still for one round of writes."""
_LOOK_SECONDS = 0.2


class SchemaChangedMeanwhile(StartAgain):
    """The table's schema changed between its copy and its hand-off: the copy starts again at once."""


class TimelineChangedMeanwhile(StartAgain):
    """The copy is of a server that the apply worker has left, or has not come to yet: their positions are not the same."""


class SyncFollow:
    """Used by the worker's thread, once. The slot's connection is this one's to close, through `close`."""

    def __init__(self, run: Run, tables: SyncTables, slot: SyncSlot, admin: Connection, bell: Bell) -> None:
        self._run = run
        self._tables = tables
        self._slot = slot
        self._admin = admin
        self._bell = bell
        self._write = SyncWrite(run, tables, slot.name)
        self._decoder = run.decoder()
        schemas = [table.schema for table in tables.working if table.schema is not None]
        self._ownership = SyncOwnership(schemas, slot.start)
        options = run.stream_options(binary=not any(needs_text(schema) for schema in schemas))
        self._stream = SlotStream(slot.connection, slot.name, slot.start, options, bell)
        self._position = slot.start
        """Everything before it was written, or waits in `_deferred`."""
        self._deferred: list[EventBatch] = []
        """What nobody stands still for, while somebody stands still."""
        self._asked: set[TableId] = set()
        """Those that are being handed over: nothing of theirs is deferred."""
        self._busy: set[TableId] = set()
        self._looked_at = 0.0
        self._distance = math.inf
        self._replied_for: EndLsn | None = None

    def close(self) -> None:
        self._stream.close()

    def follow(self) -> None:
        """Returns when every table was handed over, or is out for another reason."""
        while self._tables.working:
            self._run.raise_if_stopped()
            if self._has_room():
                for chunk in self._stream.take():
                    self._decoder.feed(chunk.data)
            self._tables.end_stopped()
            moved = self._take_in()
            self._hand_over()
            if not self._asked:
                self._write_deferred()
            self._ask_if_close(gaining=moved)
            self._bell.wait(_LOOK_SECONDS)

    def _has_room(self) -> bool:
        """What is deferred lies in memory: with a batch of it, only who stands still for us is a reason to read on.

        The apply worker may be long in answering, while it waits for the store or for its connection.
        """
        if sum(batch.size_bytes for batch in self._deferred) < self._run.config.batch.max_bytes:
            return True
        return not self._asked.isdisjoint(self._run.board.in_phase(Phase.CATCHUP))

    # The hand-off

    def _hand_over(self) -> None:
        """Those that are asked to come up to where we are. One record: the apply worker stands still until then."""
        board = self._run.board
        done, behind = list[SyncTable](), None
        for table in self._tables.working:
            state = board.get(table.id)
            if table.id not in self._asked or state is None or state.phase is not Phase.CATCHUP or state.lsn is None:
                continue
            if self._position >= state.lsn:
                done.append(table)
            else:
                behind = state.lsn
        if done:
            self._check_timeline()
            self._tables.move(done, sync_done(self._position))
            for table in done:
                self._tables.end(table)
        self._asked &= self._ids()
        if behind is not None and behind != self._replied_for:
            # Everybody waits for us: without traffic the server says how far it is only when asked.
            self._replied_for = behind
            self._stream.request_reply()

    def _check_timeline(self) -> None:
        follows = self._run.board.timeline
        if follows is not None and follows != self._slot.timeline:
            raise TimelineChangedMeanwhile(
                f"the source changed its timeline during the copy of {self._tables.what}",
                detail=f"the copy is of timeline {self._slot.timeline}, changes are followed on {follows}",
                hint="Nothing is to be done: it is copied again at once.",
            )

    def _ask_if_close(self, gaining: bool) -> None:
        if time.monotonic() - self._looked_at <= _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        if not self._asked and self._tables.working:
            before, self._distance = self._distance, flush_lsn(self._admin).value - self._position.value
            if self._distance < _CLOSE_BYTES or (gaining and self._distance > before * _STILL_GAINING):
                self._asked = self._next_to_go()
                self._run.board.move_all(dict.fromkeys(self._asked, SYNC_WAIT), Actor.TABLE_SYNC)
        self._stream.request_reply()

    def _next_to_go(self) -> set[TableId]:
        resting = self._ids() - self._busy
        return resting or set(sorted(self._ids())[:_BUSY_AT_ONCE])

    def _ids(self) -> set[TableId]:
        return {table.id for table in self._tables.working}

    # Changes

    def _take_in(self) -> bool:
        """Write what has come whole, as far as it is urgent; whether we came further."""
        self._ownership.keep(self._ids())
        if not self._decoder.has_transactions:
            idle = self._decoder.idle_position
            if idle is None or idle <= self._position:
                return False
            self._position = idle
            self._confirm()
            return True
        batch = self._seal()
        self._busy = set(batch.tables)
        if self._asked:
            self._write.persist(batch.without(batch.tables.keys() - self._asked))
            rest = batch.without(self._asked)
            if rest.tables:
                self._deferred.append(rest)
        else:
            self._write.persist(batch)
        self._position = batch.end_lsn
        self._confirm()
        return True

    def _write_deferred(self) -> None:
        while self._deferred:
            self._write.persist(self._deferred[0])
            del self._deferred[0]
            self._confirm()

    def _confirm(self) -> None:
        if not self._deferred:
            self._stream.confirm(self._position)

    def _seal(self) -> EventBatch:
        while True:
            try:
                changes = self._decoder.seal(self._ownership.assign)
                break
            except ValueOutOfRange as error:
                table = self._table(error.table_id)
                if table is None:
                    raise
                self._fail(table, error)
        assert changes is not None
        changed = self._ownership.take_changed()
        for id in changed:
            table = self._table(id)
            if table is not None:
                what = f"the schema of {table.published.name} changed during its copy"
                self._fail(table, SchemaChangedMeanwhile(what, hint="The table is copied again at once."))
        return EventBatch.of(changes).without(changed)

    def _fail(self, table: SyncTable, error: HeadwaterError) -> None:
        self._tables.fail(table, error)
        self._ownership.keep(self._ids())

    def _table(self, table_id: int | None) -> SyncTable | None:
        return next((table for table in self._tables.working if table.id == table_id), None)
