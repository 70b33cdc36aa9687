"""From the copies to the hand-off: a worker follows its own slot for all its tables, comes close, asks, and hands over.

It comes close to the server's position before it asks, and has nothing left to write when the answer comes but what came
meanwhile. The apply worker answers when it begins to write a batch of its own, so both write side by side, and it stands
still only for as long as the last write here takes longer than its own. Nothing else is written until then. What is
written here is durable before the slot's position is confirmed (invariant 2).
"""

from __future__ import annotations

import logging
import math
import time

from headwater.engine.follow.ownership import SyncOwnership, needs_text
from headwater.engine.follow.read_on import may_read_on, reads_until
from headwater.engine.retry import Attempts
from headwater.engine.run import Run
from headwater.engine.table_sync.slot import SyncSlot
from headwater.engine.table_sync.stream import SyncStream
from headwater.engine.table_sync.tables import SyncTable, SyncTables
from headwater.engine.table_sync.write import SyncWrite
from headwater.engine.wake_up import WakeUp
from headwater.errors import HeadwaterError, Meaning, StartAgain, ValueOutOfRange, meaning, passes
from headwater.events import EventBatch
from headwater.lsn import ZERO, EndLsn
from headwater.schema.table import TableId
from headwater.states import SYNC_WAIT, Actor, Phase, TableState, sync_done
from headwater.wire.settings import ConnectSettings

log = logging.getLogger(__name__)

_CLOSE_BYTES = 1 << 20
"""So near to the server's position that the rest is a matter of milliseconds."""
_STILL_GAINING = 0.7
"""Under steady traffic the distance shrinks to what is committed during one write, and no further: then is the time to ask."""
_PUT_OFF_BYTES = 16 << 20
"""So much may wait while other tables are handed over; with more, the last write of those that follow would be a long one."""
_LOOK_SECONDS = 0.2
_ATTEMPTS_WHILE_OTHERS_WAIT = 3


class SchemaChangedMeanwhile(StartAgain):
    """The table's schema changed between its copy and its hand-off: the copy starts again at once."""


class GaveUpMeanwhile(StartAgain):
    """The slot could not be followed while the apply worker stood still: that is nobody's error, and the copy starts again."""


class SyncFollow:
    """Used by the worker's thread, once. The slot's connection is this one's to close, through `close`."""

    def __init__(
        self, run: Run, tables: SyncTables, slot: SyncSlot, settings: ConnectSettings, wake_up: WakeUp
    ) -> None:
        self._run = run
        self._tables = tables
        self._wake_up = wake_up
        self._write = SyncWrite(run, tables, slot.name)
        schemas = [table.schema for table in tables.working if table.schema is not None]
        self._ownership = SyncOwnership(schemas, slot.start)
        options = run.stream_options(binary=not any(needs_text(schema) for schema in schemas))
        self._stream = SyncStream(run, slot, settings, tables.what, options, wake_up)
        for table in tables.working:
            if table.fingerprint is not None and table.fingerprint.needs_fresh_stream(run.server.version_number):
                run.table_states.needs_stream_from(table.id, slot.start)
        self._attempts = Attempts(f"following the slot of the copy of {tables.what}", run.progress)
        self._position = slot.start
        """Everything before it was written, or waits in `_unwritten`."""
        self._written = slot.start
        """Up to here something was written. After a lost connection our position may lie before it."""
        self._unwritten: EventBatch | None = None
        """What nobody stands still for, while somebody does."""
        self._reads_on_until = ZERO
        """What waits is not written before what was committed until there has come (see `read_on`)."""
        self._read_on = 0
        """How often that was done for it."""
        self._asked: set[TableId] = set()
        """Those that are being handed over."""
        self._busy: set[TableId] = set()
        self._looked_at = 0.0
        self._distance = math.inf
        self._replied_for: EndLsn | None = None

    def close(self) -> None:
        self._attempts.forget()
        self._stream.close()

    def follow(self) -> None:
        """Returns when every table was handed over, or is out for another reason."""
        while self._tables.working:
            self._run.raise_if_stopped()
            self._tables.end_stopped()
            self._keep(self._ids())
            try:
                self._go_on()
            except HeadwaterError as error:
                if not _passes(error):
                    raise
                self._connect_again(error)
            self._wake_up.wait(_LOOK_SECONDS)

    def _go_on(self) -> None:
        self._stream.begin()
        if self._has_room():
            self._stream.read()
        if self._asked:
            moved = False
            self._hand_over()
        else:
            moved = self._take_in()
        self._ask_if_close(gaining=moved)

    def _connect_again(self, error: HeadwaterError) -> None:
        """The copies are whole, and the slot keeps what follows them: a lost connection is no reason to begin anew.

        But while the apply worker stands still for us, all others wait with it: then a copy anew is the lesser evil, soon.
        """
        while True:
            if self._asked_for() is not None and self._attempts.failures >= _ATTEMPTS_WHILE_OTHERS_WAIT:
                raise GaveUpMeanwhile(
                    f"the slot of the copy of {self._tables.what} could not be followed while all others waited for it",
                    detail=error.message + (f": {error.detail}" if error.detail else ""),
                    hint="Nothing is to be done: it is copied again soon.",
                ) from error
            self._pause(self._attempts.failed(error))
            self._tables.end_stopped()
            try:
                self._stream.connect_again()
                break
            except HeadwaterError as again:
                if not _passes(again):
                    raise
                error = again
        self._unwritten, self._reads_on_until, self._read_on = None, ZERO, 0
        self._position = self._stream.confirmed
        self._distance = math.inf

    def _pause(self, seconds: float) -> None:
        """Not for long while others wait: an answer that comes meanwhile ends it, and attempts are counted from then on."""
        waited_for, until = self._asked_for() is not None, time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._wake_up.wait(min(left, _LOOK_SECONDS))
            self._run.raise_if_stopped()
            if not waited_for and self._asked_for() is not None:
                self._attempts.forget()
                return

    def _has_room(self) -> bool:
        """With a whole batch in our hands, only who stands still for us is a reason to read on.

        The apply worker may be long in answering, while it waits for the store or for its connection.
        """
        return not self._is_full() or self._asked_for() is not None

    def _is_full(self) -> bool:
        buffered = self._stream.decoder.buffered_bytes if self._stream.decoder.has_transactions else 0
        return buffered + self._unwritten_bytes >= self._run.config.batch.max_bytes

    @property
    def _unwritten_bytes(self) -> int:
        return self._unwritten.size_bytes if self._unwritten is not None else 0

    # The hand-off

    def _hand_over(self) -> None:
        """Bring those that were asked for up to where the apply worker is. One record: it stands still until then."""
        asked = self._asked_for()
        if asked is None:
            return
        # What was written here comes from nobody else.
        target = max(asked, self._written, self._reads_on_until)
        if self._position < target and not self._seal_until(target):
            if target != self._replied_for:
                # Everybody waits for us: without traffic the server says how far it is only when asked.
                self._replied_for = target
                self._stream.request_reply()
            return
        self._write_out(self._asked)
        if self._position < target or self._has_unwritten(self._asked):
            self._wake_up.notify()  # there was too much for one write, or a table waits for more: go on at once
            return
        done = [table for table in self._tables.working if table.id in self._asked_states()]
        if done:
            self._stream.check_timeline(self._run.table_states.timeline)
            self._tables.move(done, sync_done(self._position))
            for table in done:
                self._tables.end(table)
            self._attempts.succeeded()
        self._keep(self._ids())
        self._confirm()

    def _asked_states(self) -> dict[TableId, TableState]:
        catching_up = self._run.table_states.in_phase(Phase.CATCHUP)
        return {table: catching_up[table] for table in self._asked if table in catching_up}

    def _asked_for(self) -> EndLsn | None:
        """Where the apply worker is, once it has answered."""
        return max((state.lsn for state in self._asked_states().values() if state.lsn is not None), default=None)

    def _seal_until(self, target: EndLsn) -> bool:
        """Whether the changes up to there have come, or as many as are written at once."""
        whole, has_changes = self._stream.decoder.whole_until, self._stream.decoder.has_transactions
        if whole < target and not (has_changes and self._is_full()):
            return False
        if has_changes:
            self._put_off(self._seal())
        self._position = max(self._position, whole)
        return True

    def _ask_if_close(self, gaining: bool) -> None:
        if not self._asked and self._unwritten is not None and self._unwritten_bytes <= _PUT_OFF_BYTES:
            self._ask()  # the next of a group: what was put off is written with what comes until it is their turn
        if time.monotonic() - self._looked_at <= _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        if not self._asked and self._unwritten is None and self._tables.working:
            before, self._distance = self._distance, self._stream.server_position().value - self._position.value
            if self._distance < _CLOSE_BYTES or (gaining and self._distance > before * _STILL_GAINING):
                self._ask()
        elif self._asked and self._asked_for() is None:
            # A server that stops waits for us to confirm, we for an answer, and the apply worker perhaps for the server: ordinary
            # sessions end first, and this one tells.
            self._stream.server_position()
        self._stream.request_reply()

    def _ask(self) -> None:
        self._asked = self._next_to_go()
        self._run.table_states.move_all(dict.fromkeys(self._asked, SYNC_WAIT), Actor.TABLE_SYNC)

    def _next_to_go(self) -> set[TableId]:
        """All, while nobody's changes would wait; else those that rest, then as many busy ones as are written beside them."""
        table_states, all = self._run.table_states, self._ids()
        if not table_states.in_phase(Phase.READY, Phase.SYNC_DONE):
            return all
        return (all - self._busy) or set(sorted(all)[: max(1, table_states.written_at_once)])

    def _ids(self) -> set[TableId]:
        return {table.id for table in self._tables.working}

    # Changes

    def _take_in(self) -> bool:
        """Write what has come whole; whether we came further."""
        if not self._stream.decoder.has_transactions and self._unwritten is None:
            idle = self._stream.decoder.idle_position
            if idle is None or idle <= self._position:
                return False
            self._position = idle
            self._confirm()
            return True
        if self._run.table_states.in_phase(Phase.CATCHUP) and not self._is_full():
            return False  # the apply worker stands still for another worker: the machine is theirs
        whole_until = self._stream.decoder.whole_until
        if whole_until < self._reads_on_until and not self._is_full():
            return False  # it is asked for with the next look
        if self._stream.decoder.has_transactions:
            self._put_off(self._seal())
        self._position = max(self._position, whole_until)
        self._write_out(self._ids())
        self._confirm()
        return True

    def _put_off(self, batch: EventBatch) -> None:
        if max(batch.size_bytes, self._unwritten_bytes) > self._run.config.batch.max_bytes:
            # A giant lies on disk: to be put together with others it would come into memory.
            self._write_out(self._ids(), alone=True)
        self._unwritten = batch if self._unwritten is None else self._unwritten.then(batch)
        self._busy = set(self._unwritten.tables)

    def _write_out(self, tables: set[TableId], *, alone: bool = False) -> None:
        """Make durable what there is of these tables; the rest waits. `alone`: nothing that follows can be added to it."""
        if self._unwritten is None:
            return
        batch, self._unwritten = self._unwritten, None
        others = batch.without(tables).tables.keys()
        written = batch.without(others).read_on(batch.reads, self._position)
        goes_on = not alone and may_read_on(batch, self._read_on, self._run.config.batch)
        reads = self._write.persist(written, may_read_on=goes_on)
        self._written = max(self._written, batch.end_lsn)
        left = batch.without(batch.tables.keys() - others - reads.keys())
        if left.tables:
            self._unwritten = left.read_on({**batch.reads, **reads}, ZERO)
        self._reads_on_until = reads_until(reads) if reads else ZERO
        self._read_on = self._read_on + 1 if reads else 0
        if reads:
            log.info("%s: reading on to %s for values that were not sent", self._tables.what, self._reads_on_until)

    def _has_unwritten(self, tables: set[TableId]) -> bool:
        return self._unwritten is not None and not tables.isdisjoint(self._unwritten.tables)

    def _confirm(self) -> None:
        if self._unwritten is None:
            if self._position > self._stream.confirmed:
                # Not before: a connection that is made each time and never gets anywhere would hold others up for ever.
                self._attempts.succeeded()
                self._run.require_lock()
            self._stream.confirm(self._position)

    def _seal(self) -> EventBatch:
        while True:
            try:
                changes = self._stream.decoder.seal(self._ownership.assign)
                break
            except ValueOutOfRange as error:
                table = self._table(error.table_id)
                if table is None:
                    raise
                self._fail(table, error)
        assert changes is not None
        changed = changes.changed | self._ownership.changed_by(changes.leaves)
        for id in changed:
            table = self._table(id)
            if table is not None:
                what = f"the schema of {table.published.name} changed during its copy"
                self._fail(table, SchemaChangedMeanwhile(what, hint="The table is copied again at once."))
        return changes.without(changed)

    def _fail(self, table: SyncTable, error: HeadwaterError) -> None:
        self._tables.fail(table, error)
        self._keep(self._ids())

    def _keep(self, tables: set[TableId]) -> None:
        """No other table is ours any more."""
        self._asked &= tables
        self._ownership.keep(tables)
        if self._unwritten is not None:
            # What was put off for a table that is out is written by nobody: it must not keep the others' from being confirmed.
            kept = self._unwritten.without(self._unwritten.tables.keys() - tables)
            self._unwritten = kept if kept.tables else None

    def _table(self, table_id: int | None) -> SyncTable | None:
        return next((table for table in self._tables.working if table.id == table_id), None)


def _passes(error: HeadwaterError) -> bool:
    """Whether a new connection may be all it takes: trouble of the source's, for what the destination says is dealt with."""
    return passes(error) and meaning(error) is not Meaning.START_AGAIN
