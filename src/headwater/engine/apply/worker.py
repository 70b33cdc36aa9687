"""The apply worker: follows the pipeline's slot for all tables that are ready, and takes tables over from their copies.

Order of every batch: write, record, confirm (invariant 2). While the destination writes one batch, the next one fills. What may
happen when is decided in `engine.hand_off`; this is where it is done.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from headwater.changes import EPOCH_2000_SECONDS
from headwater.config.pipeline import BatchConfig
from headwater.engine.apply.pause import HandOffPause
from headwater.engine.apply.publication_gap import PublicationGap
from headwater.engine.apply.record import ApplyRecord
from headwater.engine.apply.slot import ApplySlot
from headwater.engine.apply.write import BatchWriter, WrittenBatch
from headwater.engine.follow.follower import Follower
from headwater.engine.follow.ownership import TextNeeded
from headwater.engine.follow.stream_facts import StreamFacts
from headwater.engine.hand_off import ApplyHandOff, MayAnswer, in_phase
from headwater.engine.memory import MemoryMonitor
from headwater.engine.retry import Attempts
from headwater.engine.run_guard import RunGuard
from headwater.engine.table_states import TableStates
from headwater.engine.wake_up import WakeUp
from headwater.errors import (
    HeadwaterError,
    Meaning,
    PublicationMissing,
    ServerError,
    ShutdownRequested,
    meaning,
    passes,
)
from headwater.events import EventBatch
from headwater.limits import naming_limits
from headwater.lsn import EndLsn
from headwater.states import INIT, READY, Actor, Phase

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
_INTERNAL = "XX"
_INTERNAL_ERRORS = 5


class ApplyWorker:
    """Runs in one thread (`run`) until the guard's stop is set; raises what it cannot go on with."""

    def __init__(
        self,
        limits: BatchConfig,
        follower: Follower,
        hand_off: ApplyHandOff,
        slot: ApplySlot,
        writer: BatchWriter,
        record: ApplyRecord,
        gap: PublicationGap,
        table_states: TableStates,
        facts: StreamFacts,
        memory: MemoryMonitor,
        guard: RunGuard,
        wake_up: WakeUp,
    ) -> None:
        self._limits = limits
        self._follower = follower
        self._hand_off = hand_off
        self._positions = hand_off.positions
        self._slot = slot
        self._writer = writer
        self._record = record
        self._gap = gap
        self._table_states = table_states
        self._facts = facts
        self._memory = memory
        self._guard = guard
        self._wake_up = wake_up
        self._follow_attempts = Attempts("following the slot", guard.progress)
        self._filling_since: float | None = None
        self._reported = (0, 0)
        self._internal_errors = 0
        """Without progress in between."""
        self._pause = HandOffPause(table_states, guard.progress)

    def wake(self) -> None:
        self._wake_up.notify()

    def run(self) -> None:
        self._table_states.listen(self.wake)
        self._report()
        try:
            while not self._guard.stop.is_set():
                self._step()
            self._drain()
        except HeadwaterError as error:
            # Interrupted while waiting to write a batch again: sealing what came after it would confirm past it.
            if meaning(error) is not Meaning.STOPPING:
                raise
        finally:
            self._follower.disconnect()
            self._slot.close()

    def _step(self) -> None:
        try:
            with naming_limits("following the slot"):
                self._advance()
        except TextNeeded as reason:
            log.info("following the slot in text form from now on: %s", reason)
            self._follower.use_text()
            self._settle_and_disconnect()
        except PublicationMissing as error:
            self._settle_and_disconnect()
            if not self._gap.pass_over(error):
                self._wait_to_reconnect(error)
        except HeadwaterError as error:
            if not (passes(error) or self._is_internal(error)):
                raise
            # Always with a new connection: whatever was sealed and not written comes again.
            self._wait_to_reconnect(error)

    def _advance(self) -> None:
        if not self._follower.is_connected:
            self._connect()
        self._wake_up.wait(_LOOK_SECONDS)
        self._read()
        self._finish_write()
        self._take_over()
        begun = self._begin_write()
        # Beside a write of ours, or when there is nothing to write: then no table's changes wait long for the hand-off.
        if begun or not (self._writer.is_busy or self._is_due()):
            self._answer()
        self._confirm_idle()
        self._report()

    # Connection

    def _connect(self) -> None:
        self._guard.require_lock()
        self._hand_off.dropped()
        self._follower.connect()
        self._facts.passed(self._positions.sealed)
        self._filling_since = None
        # Not more: a transaction that ends the server's session each time would be sent again as fast as it can be.
        self._follow_attempts.resumed()

    def _is_internal(self, error: HeadwaterError) -> bool:
        """An internal error of the server's decoding may be gone with a new session, or come for ever: tried a few times."""
        if not isinstance(error, ServerError) or not error.sqlstate.startswith(_INTERNAL):
            return False
        self._internal_errors += 1
        return self._internal_errors <= _INTERNAL_ERRORS

    def _settle_and_disconnect(self) -> None:
        """Let the batch under way end; the slot is then followed again from what is confirmed."""
        try:
            self._await_write()
        except HeadwaterError as error:
            # It was written, and could not be confirmed: it comes again, as what is not confirmed always does.
            if not passes(error):
                raise
            log.info("the batch under way was not confirmed: %s", error.summary)
        self._follower.disconnect()

    def _wait_to_reconnect(self, error: HeadwaterError) -> None:
        seconds = self._follow_attempts.failed(error)
        self._settle_and_disconnect()
        self._guard.pause(seconds)

    # Reading and sealing

    def _read(self) -> None:
        if self._is_full:
            return
        # Only while something can be written, which makes room: a transaction that is not whole yet would never be.
        if self._memory.is_short and (self._writer.is_busy or self._follower.has_transactions):
            return
        self._follower.read()
        if self._follower.has_transactions and self._filling_since is None:
            self._filling_since = time.monotonic()

    @property
    def _is_full(self) -> bool:
        return self._follower.waiting_bytes >= self._limits.max_bytes

    def _is_due(self) -> bool:
        """A batch leaves when the destination is free and the socket is dry, or when it is full, or has filled too long."""
        if not self._follower.has_transactions:
            return False
        filled = time.monotonic() - (self._filling_since or 0.0)
        if self._memory.is_short or self._follower.dry or self._is_full:
            return True
        return filled * 1000 >= self._limits.max_fill_ms

    def _cut(self) -> EventBatch | None:
        """Seal a batch. A table that leaves meanwhile is either left out of it, or is marked as being written."""
        with self._table_states.deciding:
            batch = self._seal()
            self._table_states.writing(batch.tables if batch is not None else ())
            return batch

    def _seal(self) -> EventBatch | None:
        # A value that cannot be decoded must not stop the other tables (invariant 15).
        batch = self._follower.seal(self._record.failed)
        if batch is None:
            return None
        if batch.leaves:
            self._record.leaves(batch.leaves)
        self._facts.note(batch)
        # Recorded before the batch is: once progress is past the change of schema, only a new copy brings the table back.
        for table in batch.changed & self._table_states.in_phase(Phase.READY, Phase.SYNC_DONE).keys():
            log.warning(
                "table %s is copied again: its columns, name or identity changed in the stream",
                self._table_states.name(table),
            )
            self._record.states({table: INIT})
        # What came before the change is in the new copy as well; writing it now would meet that copy's own writes.
        return batch.without(batch.changed)

    # Writing

    def _begin_write(self) -> bool:
        """Whether a batch is on its way to the destination now that was not before."""
        if not self._is_due() or not self._hand_off.may_begin(self._table_states.all()):
            return False
        batch = self._cut()
        if batch is None:
            return False
        self._filling_since = None
        self._hand_to_destination(batch)
        return bool(batch.tables)

    def _hand_to_destination(self, batch: EventBatch) -> None:
        confirm = self._hand_off.sealed(batch.end_lsn, has_changes=bool(batch.tables))
        if confirm is not None:
            self._confirm(confirm)
        else:
            self._writer.begin(batch)

    def _finish_write(self) -> None:
        if self._writer.reads_on_until is not None:
            self._join_what_followed(self._writer.reads_on_until)
        written = self._writer.finish()
        if written is not None:
            self._settle(written)

    def _settle(self, written: WrittenBatch) -> None:
        self._hand_off.written()
        for table, error in written.table_errors.items():
            self._record.failed(table, error)
        if (position := self._hand_off.to_record()) is not None:
            self._record.progress(position)
        if (position := self._hand_off.to_confirm()) is not None:
            self._confirm(position)
        self._table_states.writing(())
        batch = written.batch
        newest = float(batch.transactions.commit_time_us[-1]) / 1e6 + EPOCH_2000_SECONDS
        self._guard.progress.batch_applied(batch.change_count, len(batch.tables), written.seconds, newest)

    def _join_what_followed(self, until: EndLsn) -> None:
        """Write the batch again together with what followed it, once all of that has come."""
        whole_until = self._follower.whole_until
        if whole_until < until:
            if self._is_full or self._memory.is_short:
                self._writer.stops_reading_on()
            else:
                self._follower.ask_position()
            return
        batch, reads = self._writer.waiting
        with self._table_states.deciding:
            if not self._hand_off.may_extend(self._table_states.all()):
                return  # until the tables in Catchup are handed over
            followed = self._cut()
            joined = batch if followed is None else batch.then(followed)
            joined = joined.without(
                joined.tables.keys() - self._table_states.in_phase(Phase.READY, Phase.SYNC_DONE).keys()
            )
            self._table_states.writing(joined.tables)
        self._hand_off.sealed(joined.end_lsn, has_changes=True)
        self._writer.goes_on_with(joined.read_on(reads, whole_until))

    def _await_write(self) -> None:
        while self._writer.is_busy:
            if self._writer.reads_on_until is not None:
                # Nothing more is read: it comes again with the next connection, and what follows it as well.
                self._writer.drop()
                self._hand_off.dropped()
                self._table_states.writing(())
                return
            if self._writer.is_to_be_tried_again:
                self._guard.raise_if_stopped()
            self._wake_up.wait(_LOOK_SECONDS)
            self._finish_write()

    def _drain(self) -> None:
        """On an orderly stop: what was read whole is written, recorded and confirmed.

        An error while stopping ends it: nothing more was confirmed, so it comes again with the next run.
        """
        if not self._follower.is_connected:
            return
        with suppress(ShutdownRequested, TextNeeded):
            self._await_write()
            if not self._hand_off.may_begin_last(self._table_states.all()):
                return
            batch = self._cut()
            if batch is not None and batch.tables:
                self._hand_to_destination(batch)
                self._await_write()

    # Confirming

    def _confirm(self, position: EndLsn) -> None:
        if position > self._positions.confirmed:
            self._guard.require_lock()
            self._slot.follow_timeline()
            self._hand_off.confirmed(position)
            self._internal_errors = 0
            self._follow_attempts.succeeded()
            self._follower.confirm(position)
        else:
            self._hand_off.confirmed(position)
        self._report()

    def _confirm_idle(self) -> None:
        if not self._follower.is_connected or not self._follower.dry:
            return
        position = self._hand_off.idle(self._follower.idle_position)
        if position is not None:
            self._facts.passed(position)
            self._confirm(position)
        elif self._facts.is_awaited and not self._writer.is_busy:
            self._follower.ask_position()

    def _report(self) -> None:
        """Also while nothing can be confirmed. How far the server is beyond what was received is asked for elsewhere."""
        received, confirmed = self._positions.received.value, self._positions.confirmed.value
        if (received, confirmed) != self._reported:
            self._reported = received, confirmed
            self._guard.progress.position(received, confirmed, max(received, confirmed))

    # Hand-off

    def _answer(self) -> None:
        """Say to tables that wait how far the apply worker is: it begins no further batch until they have come as far."""
        table_states = self._table_states
        asking = table_states.in_phase(Phase.SYNC_WAIT)
        if not asking or not self._may_answer(table_states.stream_needed_from(asking)):
            return
        with table_states.deciding:
            asking = table_states.in_phase(Phase.SYNC_WAIT)
            needed = table_states.stream_needed_from(asking)
            is_recorded = self._hand_off.to_record_before_answering(needed) is None
            if is_recorded and self._hand_off.may_answer(needed) is MayAnswer.YES:
                # Their workers may fail at this very moment: a table in Catchup without a worker would hold up all others.
                table_states.move_all(dict.fromkeys(asking, self._hand_off.answer()), Actor.APPLY, only_from=asking)
            self._pause.look(table_states.all(), due=False)

    def _may_answer(self, needed: EndLsn) -> bool:
        """Whether the stream began late enough for the tables that ask; if not, it is begun again as soon as it may be."""
        answer = self._hand_off.may_answer(needed)
        if answer is MayAnswer.FOLLOW_AGAIN:
            log.info("following the slot again: what a partition is published as was changed at %s", needed)
            self._await_write()
            self._follower.disconnect()
        elif answer is MayAnswer.NOT_YET:
            self._follower.ask_position()
        elif (position := self._hand_off.to_record_before_answering(needed)) is not None:
            self._record.progress(position)
        return answer is MayAnswer.YES

    def _take_over(self) -> None:
        """Take over the tables in SyncDone that are confirmed up to where their copies were handed over."""
        with self._table_states.deciding:
            states = self._table_states.all()
            self._pause.look(states, due=not self._writer.is_busy and self._is_due())
            if not in_phase(states, Phase.SYNC_DONE):
                return
            take_over = self._hand_off.take_over(states)
            if take_over.record is not None:
                self._record.progress(take_over.record)
            if take_over.ready:
                self._record.states(dict.fromkeys(take_over.ready, READY), only_from=take_over.ready)
            for table in take_over.ready:
                self._table_states.succeeded(table)
        if take_over.waits:
            self._follower.ask_position()
