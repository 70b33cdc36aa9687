"""From the copies to the hand-off: a worker follows its own slot for all its tables until the apply worker takes them over.

It comes close to the server's position before it asks, and has nothing left to write when the answer comes but what came
meanwhile. The apply worker answers when it begins to write a batch of its own, so both write side by side, and it waits
only for as long as the last write here takes longer than its own. What is written here is durable before the slot's
position is confirmed (invariant 2). What may happen when is decided in `engine.hand_off`.
"""

from __future__ import annotations

import logging
import time

from headwater.config.pipeline import BatchConfig
from headwater.engine.follow.follower import Follower
from headwater.engine.follow.ownership import TableSyncOwnership
from headwater.engine.follow.read_on import may_read_on, reads_until
from headwater.engine.hand_off import TableSyncHandOff
from headwater.engine.retry import Attempts
from headwater.engine.run_guard import RunGuard
from headwater.engine.table_states import TableStates
from headwater.engine.table_sync.slot import SyncSlot
from headwater.engine.table_sync.tables import SyncTable, SyncTables
from headwater.engine.table_sync.write import SyncWrite
from headwater.engine.wake_up import WakeUp
from headwater.errors import HeadwaterError, Meaning, StartAgain, meaning, passes
from headwater.events import EventBatch
from headwater.lsn import ZERO, EndLsn
from headwater.schema.table import TableId
from headwater.states import SYNC_WAIT, Actor

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_ATTEMPTS_WHILE_OTHERS_WAIT = 3


class SchemaChangedMeanwhile(StartAgain):
    """The table's schema changed between its copy and its hand-off: the copy starts again at once."""


class SlotUnreachableMeanwhile(StartAgain):
    """The slot could not be followed while the apply worker waited for it: no table's own error; the copy starts again."""


class CatchUp:
    """Used by the worker's thread, once."""

    def __init__(
        self,
        limits: BatchConfig,
        tables: SyncTables,
        slot: SyncSlot,
        follower: Follower,
        ownership: TableSyncOwnership,
        write: SyncWrite,
        table_states: TableStates,
        guard: RunGuard,
        wake_up: WakeUp,
    ) -> None:
        self._limits = limits
        self._tables = tables
        self._slot = slot
        self._follower = follower
        self._ownership = ownership
        self._write = write
        self._table_states = table_states
        self._guard = guard
        self._wake_up = wake_up
        self._hand_off = TableSyncHandOff(self._ids(), follower.positions)
        self._positions = follower.positions
        self._attempts = Attempts(f"following the slot of the copy of {tables.what}", guard.progress)
        self._deferred: EventBatch | None = None
        """Changes that are not written yet: of tables outside the hand-off that is under way, or of tables that wait for more."""
        self._read_on = 0
        """How often the stream was read on for them."""
        self._looked_at = 0.0
        self._asked_position_for: EndLsn | None = None

    def close(self) -> None:
        self._attempts.forget()
        self._follower.disconnect()
        self._slot.close()

    def run(self) -> None:
        """Returns when every table was handed over, or has left the worker for another reason."""
        while self._tables.working:
            self._guard.raise_if_stopped()
            self._tables.end_stopped()
            self._keep_working()
            try:
                self._advance()
            except HeadwaterError as error:
                if not _passes(error):
                    raise
                self._connect_again(error)
            self._wake_up.wait(_LOOK_SECONDS)

    def _advance(self) -> None:
        if not self._follower.is_connected:
            self._follower.connect()
        # With a whole batch in memory, the only reason to read on is that the apply worker waits for it. It may take long to
        # answer, while it waits for the store or for its connection.
        if not self._is_full or self._answered is not None:
            self._follower.read()
        gaining = False
        if self._hand_off.asked:
            self._hand_over()
        else:
            gaining = self._take_in()
        self._ask_if_close(gaining)

    # Connection

    def _connect_again(self, error: HeadwaterError) -> None:
        """The copies are complete, and the slot keeps what follows them: a lost connection is no reason to copy again.

        But while the apply worker waits for this worker, all tables wait: then another copy costs less.
        """
        while True:
            if self._answered is not None and self._attempts.failures >= _ATTEMPTS_WHILE_OTHERS_WAIT:
                raise SlotUnreachableMeanwhile(
                    f"the slot of the copy of {self._tables.what} could not be followed while the apply worker waited for it",
                    detail=error.message + (f": {error.detail}" if error.detail else ""),
                    hint="Nothing is to be done: the table is copied again soon.",
                ) from error
            self._pause(self._attempts.failed(error))
            self._tables.end_stopped()
            self._follower.disconnect()
            try:
                self._follower.connect()
                break
            except HeadwaterError as again:
                if not _passes(again):
                    raise
                error = again
        self._hand_off.lost_connection()
        self._deferred, self._read_on = None, 0

    def _pause(self, seconds: float) -> None:
        """Not for long while the apply worker waits: its answer ends the pause, and attempts are counted from then on."""
        waited_for, until = self._answered is not None, time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._wake_up.wait(min(left, _LOOK_SECONDS))
            self._guard.raise_if_stopped()
            if not waited_for and self._answered is not None:
                self._attempts.forget()
                return

    # The hand-off

    @property
    def _answered(self) -> EndLsn | None:
        return self._hand_off.answered(self._table_states.all())

    def _hand_over(self) -> None:
        """Bring the tables that were asked for up to where the apply worker is. One record for all: it waits until then."""
        target = self._hand_off.target(self._table_states.all())
        if target is None:
            return
        if self._positions.sealed < target and not self._seal_until(target):
            if target != self._asked_position_for:
                # The apply worker waits: without traffic the server says how far it is only when asked.
                self._asked_position_for = target
                self._follower.ask_position(at_once=True)
            return
        self._write_out()
        done = self._hand_off.to_hand_over(self._table_states.all(), target)
        if not done:
            self._wake_up.notify()  # there was too much for one write, or a table waits for more: go on at once
            return
        self._slot.check_timeline(self._table_states.timeline)
        tables = [table for table in self._tables.working if table.id in done]
        self._tables.move(tables, next(iter(done.values())))
        for table in tables:
            self._tables.end(table)
        self._hand_off.handed_over(done)
        self._attempts.succeeded()
        self._keep_working()
        self._confirm()

    def _seal_until(self, target: EndLsn) -> bool:
        """Whether the changes up to there have come, or as many as are written at once."""
        whole_until = self._follower.whole_until
        if whole_until < target and not (self._follower.has_transactions and self._is_full):
            return False
        self._seal_and_defer()
        self._hand_off.advanced(whole_until)
        return True

    def _ask_if_close(self, gaining: bool) -> None:
        if self._hand_off.may_ask_next(self._deferred_bytes):
            self._ask()
        if time.monotonic() - self._looked_at <= _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        if not self._hand_off.asked and self._deferred is None and self._tables.working:
            distance = self._slot.server_position().value - self._positions.sealed.value
            if self._hand_off.may_ask(distance, gaining=gaining):
                self._ask()
        elif self._hand_off.asked and self._answered is None:
            # A server that is being stopped waits for our confirmation, we for an answer, and the apply worker perhaps for
            # the server. Ordinary sessions end first, so this one notices.
            self._slot.server_position()
        self._follower.ask_position(at_once=True)

    def _ask(self) -> None:
        asked = self._hand_off.ask(self._table_states.all(), self._table_states.written_at_once)
        self._table_states.move_all(dict.fromkeys(asked, SYNC_WAIT), Actor.TABLE_SYNC)

    def _ids(self) -> set[TableId]:
        return {table.id for table in self._tables.working}

    # Changes

    @property
    def _is_full(self) -> bool:
        return self._follower.waiting_bytes + self._deferred_bytes >= self._limits.max_bytes

    @property
    def _deferred_bytes(self) -> int:
        return self._deferred.size_bytes if self._deferred is not None else 0

    def _take_in(self) -> bool:
        """Write what has come whole; whether we came further."""
        if not self._follower.has_transactions and self._deferred is None:
            idle = self._follower.idle_position
            if idle is None or idle <= self._positions.sealed:
                return False
            self._hand_off.advanced(idle)
            self._confirm()
            return True
        if not self._is_full and self._hand_off.lets_others_go_first(self._table_states.all()):
            return False
        whole_until = self._follower.whole_until
        if not self._is_full and self._hand_off.awaits(whole_until):
            return False  # it is asked for with the next look
        self._seal_and_defer()
        self._hand_off.advanced(whole_until)
        self._write_out()
        self._confirm()
        return True

    def _seal_and_defer(self) -> None:
        batch = self._seal()
        if batch is None:
            return
        if max(batch.size_bytes, self._deferred_bytes) > self._limits.max_bytes:
            # A large transaction lies on disk: put together with others, it would come into memory.
            self._write_out(alone=True)
        self._deferred = batch if self._deferred is None else self._deferred.then(batch)
        self._hand_off.deferring(self._deferred.tables)

    def _write_out(self, *, alone: bool = False) -> None:
        """Make durable what there is of the tables that are written now; the rest is deferred. `alone`: of all tables, and
        nothing that follows can be added."""
        if self._deferred is None:
            return
        batch, self._deferred = self._deferred, None
        tables = self._ids() if alone else self._hand_off.to_write()
        others = batch.without(tables).tables.keys()
        written = batch.without(others).read_on(batch.reads, self._positions.sealed)
        goes_on = not alone and may_read_on(batch, self._read_on, self._limits)
        reads = self._write.persist(written, may_read_on=goes_on)
        left = batch.without(batch.tables.keys() - others - reads.keys())
        until = reads_until(reads) if reads else ZERO
        self._hand_off.wrote(batch.end_lsn, left.tables, reads_on_until=until)
        if left.tables:
            self._deferred = left.read_on({**batch.reads, **reads}, ZERO)
        self._read_on = self._read_on + 1 if reads else 0
        if reads:
            log.info("%s: reading on to %s for values that were not sent", self._tables.what, until)

    def _confirm(self) -> None:
        position = self._hand_off.to_confirm()
        if position is not None:
            # Not before: a connection that is made each time and never gets anywhere would hold others up for ever.
            self._attempts.succeeded()
            self._guard.require_lock()
            self._hand_off.confirmed(position)
            self._follower.confirm(position)

    def _seal(self) -> EventBatch | None:
        batch = self._follower.seal(self._fail)
        if batch is None:
            return None
        for table in self._tables.working:
            if table.id in batch.changed:
                what = f"the schema of {table.published.name} changed during its copy"
                self._fail(table.id, SchemaChangedMeanwhile(what, hint="The table is copied again at once."))
        return batch.without(batch.changed)

    def _fail(self, table_id: TableId, error: HeadwaterError) -> None:
        table = self._table(table_id)
        if table is None:
            raise error
        self._tables.fail(table, error)
        self._keep_working()

    def _keep_working(self) -> None:
        """No other table is this worker's any more."""
        tables = self._ids()
        self._hand_off.keep(tables)
        self._ownership.keep(tables)
        if self._deferred is not None:
            # What was deferred for a table that has left is not written: it must not keep the others' from being confirmed.
            kept = self._deferred.without(self._deferred.tables.keys() - tables)
            self._deferred = kept if kept.tables else None

    def _table(self, table_id: TableId) -> SyncTable | None:
        return next((table for table in self._tables.working if table.id == table_id), None)


def _passes(error: HeadwaterError) -> bool:
    """Whether a new connection may be all it takes: the source was unreachable. What the destination says is dealt with."""
    return passes(error) and meaning(error) is not Meaning.START_AGAIN
