"""From the copies to the hand-off: a worker follows its own slot for all its tables, comes close, asks, and hands over.

It comes close to the server's position before it asks, and it asks for all of them at once, so that the apply worker pauses
once and shortly. What is written here is durable before the slot's position is confirmed (invariant 2).
"""

from __future__ import annotations

import logging
import math
import time

from headwater.contracts.results import WriteEventsResult
from headwater.contracts.stores import WorkerType
from headwater.engine.bell import Bell
from headwater.engine.calls import call
from headwater.engine.ownership import SyncOwnership, needs_text
from headwater.engine.retry import WORLD, Backoff, raise_if_not_the_tables_own
from headwater.engine.run import Run
from headwater.engine.slot_stream import SlotStream
from headwater.engine.sync_slot import SyncSlot
from headwater.engine.sync_tables import StartAgain, SyncTable, SyncTables
from headwater.errors import HeadwaterError, ValueOutOfRange
from headwater.events import EventBatch
from headwater.lsn import EndLsn
from headwater.source.server import flush_lsn
from headwater.source.session import Connection
from headwater.states import SYNC_WAIT, Actor, Phase, sync_done

log = logging.getLogger(__name__)

_CLOSE_BYTES = 1 << 20
"""So near to the server's position that the rest is a matter of milliseconds."""
_STILL_GAINING = 0.7
"""Under steady traffic the distance shrinks to what is committed during one write, and no further: then is the time to ask."""
_LOOK_SECONDS = 0.2


class SchemaChangedMeanwhile(StartAgain):
    """The table's schema changed between its copy and its hand-off: the copy starts again at once."""


class SyncFollow:
    """Used by the worker's thread, once. The slot's connection is this one's to close, through `close`."""

    def __init__(self, run: Run, tables: SyncTables, slot: SyncSlot, admin: Connection, bell: Bell) -> None:
        self._run = run
        self._tables = tables
        self._slot = slot
        self._admin = admin
        self._bell = bell
        self._decoder = run.decoder()
        schemas = [table.schema for table in tables.working if table.schema is not None]
        self._ownership = SyncOwnership(schemas, slot.start)
        options = run.stream_options(binary=not any(needs_text(schema) for schema in schemas))
        self._stream = SlotStream(slot.connection, slot.name, slot.start, options, bell)
        self._position = slot.start
        self._asked_at = 0.0
        self._asked_for: EndLsn | None = None
        self._distance = math.inf

    def close(self) -> None:
        self._stream.close()

    def follow(self) -> None:
        """Returns when every table was handed over, or is out for another reason."""
        while True:
            self._run.raise_if_stopped()
            for chunk in self._stream.take():
                self._decoder.feed(chunk.data)
            self._tables.end_stopped()
            moved = self._apply()
            if moved is not None:
                self._position = max(self._position, moved)
            self._hand_over()
            if not self._tables.working:
                return
            self._ask(gaining=moved is not None)
            self._bell.wait(_LOOK_SECONDS)

    # The hand-off

    def _hand_over(self) -> None:
        """All that are asked to come up to a position at or before ours. One record: the apply worker stands still until then."""
        board = self._run.board
        done, behind = list[SyncTable](), None
        for table in self._tables.working:
            state = board.get(table.id)
            if state is None or state.phase is not Phase.CATCHUP or state.lsn is None:
                continue
            if self._position >= state.lsn:
                done.append(table)
            else:
                behind = state.lsn
        if done:
            board.move_all({table.id: sync_done(self._position) for table in done}, Actor.TABLE_SYNC)
            for table in done:
                self._tables.end(table)
        if behind is not None and behind != self._asked_for:
            # Everybody waits for us: without traffic the server says how far it is only when asked.
            self._asked_for = behind
            self._stream.request_reply()

    def _ask(self, gaining: bool) -> None:
        if time.monotonic() - self._asked_at <= _LOOK_SECONDS:
            return
        self._asked_at = time.monotonic()
        board = self._run.board
        waiting = board.in_phase(Phase.FINISHED_COPY)
        mine = [table.id for table in self._tables.working if table.id in waiting]
        if mine:
            before, self._distance = self._distance, flush_lsn(self._admin).value - self._position.value
            if self._distance < _CLOSE_BYTES or (gaining and self._distance > before * _STILL_GAINING):
                board.move_all(dict.fromkeys(mine, SYNC_WAIT), Actor.TABLE_SYNC)
        self._stream.request_reply()

    # Changes

    def _apply(self) -> EndLsn | None:
        """Write what has come whole; the position up to which everything of these tables is durable, if it moved."""
        self._ownership.keep({table.id for table in self._tables.working})
        if not self._decoder.has_transactions:
            idle = self._decoder.idle_position
            if idle is not None:
                self._stream.confirm(idle)
            return idle
        batch = self._seal()
        if batch.tables:
            self._persist(batch)
        self._stream.confirm(batch.end_lsn)
        return batch.end_lsn

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
                name = table.published.name
                hint = "The table is copied again at once."
                self._fail(table, SchemaChangedMeanwhile(f"the schema of {name} changed during its copy", hint=hint))
        return EventBatch.of(changes).without(changed)

    def _fail(self, table: SyncTable, error: HeadwaterError) -> None:
        self._tables.fail(table, error)
        self._ownership.keep({table.id for table in self._tables.working})

    def _table(self, table_id: int | None) -> SyncTable | None:
        return next((table for table in self._tables.working if table.id == table_id), None)

    def _persist(self, batch: EventBatch) -> None:
        """Do it again while the destination or the store is away: that is no reason to throw finished copies away."""
        backoff = Backoff(0.5)
        while True:
            try:
                batch = self._kept(batch)
                self._write(batch)
                for table in self._kept(batch).tables:
                    self._run.store.upsert_replication_progress(WorkerType(table), batch.end_lsn)
                return
            except WORLD as error:
                seconds = backoff.next_seconds()
                log.warning("%s: trying again in %.1f s: %s", self._tables.what, seconds, error)
                self._run.pause(seconds)
                self._tables.end_stopped()

    def _kept(self, batch: EventBatch) -> EventBatch:
        """Without those that are out meanwhile."""
        return batch.without(batch.tables.keys() - {table.id for table in self._tables.working})

    def _write(self, batch: EventBatch) -> None:
        """One call for all. If the destination cannot say whose its trouble is, one for each: it bears the same changes twice."""
        try:
            self._call(batch)
        except WORLD:
            raise
        except HeadwaterError as error:
            self._run.raise_if_stopped()
            for table in self._of(batch):
                others = batch.tables.keys() - {table.id}
                try:
                    if others:
                        self._call(batch.without(others))
                    else:
                        raise error
                except WORLD:
                    raise
                except HeadwaterError as own:
                    self._tables.fail(table, own)

    def _call(self, batch: EventBatch) -> None:
        if not batch.tables:
            return
        run, write = self._run, self._run.destination.write_events
        pending = call(
            f"headwater-catchup-{self._slot.name}",
            WriteEventsResult(),
            lambda result: write(batch, result),
            run.deadline_seconds,
        )
        for table in self._of(batch):
            table.pending = pending
        pending.wait(run.stop)
        raise_if_not_the_tables_own(batch, pending.table_errors)
        for table in self._of(batch):
            if table.id in pending.table_errors:
                self._tables.fail(table, pending.table_errors[table.id])

    def _of(self, batch: EventBatch) -> list[SyncTable]:
        return [table for table in self._tables.working if table.id in batch.tables]
