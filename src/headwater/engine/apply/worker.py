"""The apply worker: follows the pipeline's slot for all tables that are ready, and hands tables over from their copies.

Order of every batch: write, record, confirm (invariant 2). While the destination writes one batch, the next one fills. A
position is confirmed without a batch only when nothing before it is left to write (invariant 9), and a batch without a
change for us is such a position too: recording it would make WAL and feed the stream with ourselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from headwater.changes import EPOCH_2000_SECONDS
from headwater.contracts.results import PendingResult, WriteEventsResult
from headwater.contracts.stores import APPLY
from headwater.engine.apply.slot import ApplySlot
from headwater.engine.destination_calls import call
from headwater.engine.follow.ownership import ApplyOwnership, TextNeeded
from headwater.engine.follow.read_on import may_read_on, reads_until
from headwater.engine.follow.slot_stream import SlotStream
from headwater.engine.hand_off_pause import HandOffPause
from headwater.engine.retry import Attempts, raise_if_not_the_tables_own, retrying, waits
from headwater.engine.run import Run
from headwater.engine.table_states import TableStates
from headwater.engine.wake_up import WakeUp
from headwater.errors import (
    HeadwaterError,
    Meaning,
    PublicationMissing,
    Retry,
    ServerError,
    ShutdownRequested,
    ValueOutOfRange,
    meaning,
    passes,
)
from headwater.events import EventBatch
from headwater.limits import naming_limits
from headwater.lsn import ZERO, EndLsn
from headwater.schema.table import TableId
from headwater.source.publication import publication_options
from headwater.source.session import connect
from headwater.source.slots import advance_slot, apply_slot_name
from headwater.states import INIT, READY, Actor, Phase, TableState, catchup

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
_INTERNAL = "XX"
_INTERNAL_ERRORS = 5


@dataclass(slots=True)
class _Write:
    """A batch that is being written, or waits to be written again."""

    batch: EventBatch
    pending: PendingResult
    started: float
    again_at: float | None = None
    """When the next attempt is made, after one that failed."""
    reads_on_until: EndLsn | None = None
    """It waits for what was committed until there (see `read_on`)."""
    read_on: int = 0
    """How often that was done for it."""
    gave_up: bool = False
    """Too much would have to be read."""


class ApplyWorker:
    """Runs in one thread (`run`) until the run's stop event is set; raises what it cannot live with."""

    def __init__(self, run: Run, start: EndLsn) -> None:
        self._run_ = run
        self._wake_up = WakeUp()
        self._slot = ApplySlot(run, start, self._wake_up)
        self._ownership = ApplyOwnership(run)
        self._position = start
        """Everything before it was handed to the destination or concerns nobody."""
        self._recorded = ZERO
        self._stream: SlotStream | None = None
        self._began = start
        """Where the stream was begun."""
        self._decoder = run.decoder()
        self._write: _Write | None = None
        self._follow_attempts = Attempts("following the slot", run.progress)
        self._write_attempts = Attempts("writing a batch", run.progress)
        self._filling_since: float | None = None
        self._asked_at = 0.0
        self._reported = (0, 0)
        self._internal_errors = 0
        """Without progress in between."""
        self._pause = HandOffPause(run.table_states, run.progress)

    def wake(self) -> None:
        self._wake_up.notify()

    def run(self) -> None:
        self._run_.table_states.listen(self.wake)
        self._report()
        try:
            while not self._run_.stop.is_set():
                self._step()
            self._drain()
        except HeadwaterError as error:
            # Interrupted while waiting to write a batch again: sealing what came after it would confirm past it.
            if meaning(error) is not Meaning.STOPPING:
                raise
        finally:
            self._disconnect()
            self._slot.close()

    def _step(self) -> None:
        try:
            with naming_limits("following the slot"):
                self._advance()
        except TextNeeded as reason:
            log.info("following the slot in text form from now on: %s", reason)
            self._ownership.binary = False
            self._settle_and_reconnect()
        except PublicationMissing as error:
            if not self._pass_by(error):
                self._wait_and_reconnect(error)
        except HeadwaterError as error:
            if not (passes(error) or self._is_internal(error)):
                raise
            # Always with a new connection: whatever was sealed and not handed on comes again.
            self._wait_and_reconnect(error)

    def _advance(self) -> None:
        if self._stream is None:
            self._connect()
        self._wake_up.wait(_LOOK_SECONDS)
        self._take_in()
        self._finish_write()
        self._take_over()
        begun = self._begin_write()
        # Beside a write of ours, or when there is nothing to write: then the wait for theirs holds nobody up, or hardly.
        if begun or (self._write is None and not self._is_due()):
            self._answer()
        self._confirm_idle()
        self._report()

    # Connection

    def _connect(self) -> None:
        self._run_.require_lock()
        self._stream = self._slot.open(binary=self._ownership.binary)
        # A new connection sends again whatever was not confirmed; what we held of it is dropped with the decoder.
        self._decoder = self._run_.decoder()
        self._position = self._began = self._slot.confirmed
        self._run_.told.passed(self._position)
        self._filling_since = None
        # Not more: a transaction that ends the server's session each time would be sent again as fast as it can be.
        self._follow_attempts.resumed()

    def _disconnect(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.close()

    def _is_internal(self, error: HeadwaterError) -> bool:
        """An internal error of the server's decoding may be gone with a new session, or come for ever: tried a few times."""
        if not isinstance(error, ServerError) or not error.sqlstate.startswith(_INTERNAL):
            return False
        self._internal_errors += 1
        return self._internal_errors <= _INTERNAL_ERRORS

    def _settle_and_reconnect(self) -> None:
        """Let the batch under way end, then follow the slot again from what is confirmed."""
        self._await_write()
        self._disconnect()

    def _wait_and_reconnect(self, error: HeadwaterError) -> None:
        seconds = self._follow_attempts.failed(error)
        self._settle_and_reconnect()
        self._run_.pause(seconds)

    def _pass_by(self, error: PublicationMissing) -> bool:
        """Changes were made while the publication did not exist, and the server cannot send them: every table is copied again.

        False while it still does not exist, or the server cannot be asked.
        """
        self._settle_and_reconnect()
        run = self._run_
        try:
            with connect(run.settings) as admin:
                publication_options(admin, run.config.publication_name)
                log.warning(
                    "every table is copied again: changes were made while publication %s did not exist (%s)",
                    run.config.publication_name,
                    error.message,
                )
                # States first: interrupted after any step, the next run copies everything.
                self._move_all(dict.fromkeys(run.table_states.in_phase(Phase.READY, Phase.SYNC_DONE), INIT))
                run.require_lock()
                position = advance_slot(admin, apply_slot_name(run.config.id))
        except HeadwaterError as trouble:
            if meaning(trouble) in (Meaning.FATAL, Meaning.STOPPING):
                raise
            log.info("not yet: %s", trouble.summary)
            return False
        self._record(position)
        self._slot.confirmed = position
        return True

    # Reading and writing

    def _take_in(self) -> None:
        assert self._stream is not None
        if self._decoder.has_transactions and self._decoder.buffered_bytes >= self._run_.config.batch.max_bytes:
            return
        # Only while something can be written, which makes room: a transaction that is not whole yet would never be.
        if self._run_.memory.is_short and (self._write is not None or self._decoder.has_transactions):
            return
        for chunk in self._stream.take():
            self._decoder.feed(chunk.data)
        if self._decoder.has_transactions and self._filling_since is None:
            self._filling_since = time.monotonic()

    def _is_due(self) -> bool:
        """A batch leaves when the destination is free and the socket is dry, or when it is full, or has filled too long."""
        assert self._stream is not None
        if not self._decoder.has_transactions:
            return False
        batch = self._run_.config.batch
        filled = time.monotonic() - (self._filling_since or 0.0)
        if self._run_.memory.is_short:
            return True
        return self._stream.dry or self._decoder.buffered_bytes >= batch.max_bytes or filled * 1000 >= batch.max_fill_ms

    def _begin_write(self) -> bool:
        """Whether a batch is on its way to the destination now that was not before."""
        if self._write is not None or self._pause.lasts or not self._is_due():
            return False
        batch = self._cut()
        if batch is None:
            return False
        self._filling_since = None
        if batch.tables:
            self._hand_to_destination(batch)
        else:
            self._confirm(batch.end_lsn)
        return bool(batch.tables)

    def _cut(self) -> EventBatch | None:
        """Seal a batch. Whoever takes a table from us meanwhile finds it either left out or marked as being written."""
        with self._run_.table_states.deciding:
            batch = self._seal()
            self._run_.table_states.writing(batch.tables if batch is not None else ())
            return batch

    def _seal(self) -> EventBatch | None:
        while True:
            try:
                changes = self._decoder.seal(self._ownership.assign)
                break
            except ValueOutOfRange as error:
                # One table's value must not stop the others: the table is left out from here on, and that is recorded
                # before anything of this batch is.
                if error.table_id is None:
                    raise
                self._fail_table(TableId(error.table_id), error)
        if changes is None:
            return None
        self._position = changes.end_lsn
        changed = changes.changed | self._ownership.changed_by(changes.leaves)
        if changes.leaves:
            # Before anything of this batch is: once progress is past them, nothing else would tell of a leaf that is gone.
            self._until_recorded("partitions", lambda: self._run_.table_states.leaves_told(changes.leaves))
        self._run_.told.note(changes)
        self._run_.told.passed(self._position)
        # Recorded before the batch is: once progress is past the change of schema, nothing else would bring the table back.
        for table in changed & self._run_.table_states.in_phase(Phase.READY, Phase.SYNC_DONE).keys():
            log.warning(
                "table %s is copied again: its columns, name or identity changed in the stream",
                self._run_.table_states.name(table),
            )
            self._move_all({table: INIT})
        # What came before the change is in the new copy as well; writing it now would meet that copy's own writes.
        return changes.without(changed)

    def _hand_to_destination(self, batch: EventBatch, read_on: int = 0) -> None:
        self._run_.require_lock()
        destination = self._run_.destination
        pending = call(
            "headwater-write",
            WriteEventsResult(),
            lambda result: destination.write_events(batch, result),
            self._run_.deadline_seconds,
        )
        self._write = _Write(batch, pending, time.monotonic(), read_on=read_on)
        pending.on_done(self._wake_up.notify)

    def _finish_write(self) -> None:
        write = self._write
        if write is None or not write.pending.done:
            return
        if write.reads_on_until is not None:
            self._join_what_followed(write)
            return
        if write.again_at is not None:
            if time.monotonic() >= write.again_at:
                self._hand_to_destination(write.batch, read_on=write.read_on)
            return
        for table, count in write.pending.missed.items():
            self._run_.progress.missed(table, count)
        try:
            write.pending.raise_if_failed()
            raise_if_not_the_tables_own(write.batch, write.pending.table_errors)
        except HeadwaterError as error:
            self._retry_write(write, error)
            return
        if self._reads_on(write):
            return
        self._write = None
        self._write_attempts.succeeded()
        # Before progress is: once that is past the table's changes, nothing else would bring it back.
        for table, trouble in write.pending.table_errors.items():
            self._fail_table(table, trouble)
        self._record(write.batch.end_lsn)
        self._confirm(write.batch.end_lsn)
        self._run_.table_states.writing(())
        newest = float(write.batch.transactions.commit_time_us[-1]) / 1e6 + EPOCH_2000_SECONDS
        seconds = time.monotonic() - write.started
        self._run_.progress.batch_applied(write.batch.change_count, len(write.batch.tables), seconds, newest)

    def _reads_on(self, write: _Write) -> bool:
        """Whether tables wait for what follows the batch in the stream.

        Nothing of the batch is recorded meanwhile. What is durable of it is recognised when it comes again with what follows.
        """
        reads = write.pending.reads
        if not reads or write.gave_up or not may_read_on(write.batch, write.read_on, self._run_.config.batch):
            return False
        write.reads_on_until = reads_until(reads)
        names = ", ".join(str(self._run_.table_states.name(table)) for table in reads)
        log.info("reading on to %s for values of %s that were not sent", write.reads_on_until, names)
        return True

    def _join_what_followed(self, write: _Write) -> None:
        assert write.reads_on_until is not None
        assert self._stream is not None
        decoder = self._decoder
        whole_until = decoder.whole_until
        if whole_until < write.reads_on_until:
            is_full = decoder.has_transactions and decoder.buffered_bytes >= self._run_.config.batch.max_bytes
            if is_full or self._run_.memory.is_short:
                write.reads_on_until, write.gave_up = None, True
                self._wake_up.notify()
            elif time.monotonic() - self._asked_at > _LOOK_SECONDS:
                self._asked_at = time.monotonic()
                self._stream.request_reply()
            return
        table_states = self._run_.table_states
        with table_states.deciding:
            followed = self._cut()
            joined = write.batch if followed is None else write.batch.then(followed)
            joined = joined.without(joined.tables.keys() - table_states.in_phase(Phase.READY, Phase.SYNC_DONE).keys())
            table_states.writing(joined.tables)
        self._hand_to_destination(joined.read_on(write.pending.reads, whole_until), read_on=write.read_on + 1)

    def _retry_write(self, write: _Write, error: HeadwaterError) -> None:
        """Reading goes on meanwhile as far as there is room, so that the lag is known."""
        limit = self._run_.config.table_error_retry_max_attempts
        if not waits(error) and self._write_attempts.failures >= limit:
            error = error.with_retry(Retry.NEVER)  # the budget is used up: a new connection would only begin another
        if not passes(error):
            self._write = None
            self._write_attempts.forget()
            raise error
        write.again_at = time.monotonic() + self._write_attempts.failed(error)

    def _fail_table(self, table: TableId, error: HeadwaterError) -> None:
        run = self._run_
        error = error.for_table(table)
        log.error("table %s: %s", run.table_states.name(table), error)
        run.progress.error(f"{run.table_states.name(table)}: {error}")
        with run.table_states.deciding:
            # One that is to be copied again, or left while its batch was written, is no longer ours: it needs no error.
            if table in run.table_states.in_phase(Phase.READY, Phase.SYNC_DONE):
                self._until_recorded(
                    "a table's error", lambda: run.table_states.fail(table, error, run.config, Actor.APPLY)
                )

    def _move_all(
        self, states: Mapping[TableId, TableState], only_from: Mapping[TableId, TableState] = MappingProxyType({})
    ) -> None:
        def move() -> None:
            self._run_.table_states.move_all(states, Actor.APPLY, only_from=only_from)

        self._until_recorded("table states", move)

    def _record(self, position: EndLsn) -> None:
        def upsert() -> None:
            self._slot.follow_timeline()
            self._run_.store.upsert_replication_progress(APPLY, position)

        self._until_recorded("progress", upsert)
        self._recorded = max(self._recorded, position)

    def _until_recorded(self, what: str, record: Callable[[], None]) -> None:
        def held() -> None:
            self._run_.require_lock()
            record()

        retrying(f"recording {what}", held, progress=self._run_.progress, pause=self._run_.pause)

    def _confirm(self, position: EndLsn) -> None:
        if position > self._slot.confirmed:
            self._run_.require_lock()
            self._slot.follow_timeline()
            self._slot.confirmed = position
            self._internal_errors = 0
            self._follow_attempts.succeeded()
            if self._stream is not None:
                self._stream.confirm(position)
        self._report()

    def _report(self) -> None:
        """Also while nothing can be confirmed. How far the server is beyond what was received is asked for elsewhere."""
        received, confirmed = self._decoder.received_position.value, self._slot.confirmed.value
        if (received, confirmed) != self._reported:
            self._reported = received, confirmed
            self._run_.progress.position(received, confirmed, max(received, confirmed))

    def _confirm_idle(self) -> None:
        if self._write is not None or self._stream is None or not self._stream.dry:
            return
        idle = self._decoder.idle_position
        if idle is not None and idle > self._position:
            self._position = idle
            self._run_.told.passed(idle)
            self._confirm(idle)
        elif self._run_.told.is_awaited and time.monotonic() - self._asked_at > _LOOK_SECONDS:
            self._asked_at = time.monotonic()
            self._stream.request_reply()

    # Hand-off

    def _answer(self) -> None:
        """Tell tables that wait for their turn how far we are: no further batch is begun until they have come as far."""
        table_states = self._run_.table_states
        if not self._is_fresh_for(table_states.in_phase(Phase.SYNC_WAIT)):
            return
        with table_states.deciding:
            asking = table_states.in_phase(Phase.SYNC_WAIT)
            if asking and table_states.stream_needed_from(asking) <= self._began:
                # Their workers may fail at this very moment: a Catchup that nobody works at would hold all tables up for ever.
                table_states.move_all(dict.fromkeys(asking, catchup(self._position)), Actor.APPLY, only_from=asking)
            self._pause.look(due=False)

    def _is_fresh_for(self, asking: Collection[TableId]) -> bool:
        """Whether the stream began late enough for the tables that ask; if not, it is begun again as soon as it may be."""
        needed = self._run_.table_states.stream_needed_from(asking)
        if needed <= self._began:
            return True
        if self._slot.confirmed >= needed:
            log.info("following the slot again from %s: what a partition is published as was changed", needed)
            self._await_write()
            # The next run must not begin before it either.
            self._record(self._slot.confirmed)
            self._disconnect()
        elif self._stream is not None and time.monotonic() - self._asked_at > _LOOK_SECONDS:
            self._asked_at = time.monotonic()
            self._stream.request_reply()
        return False

    def _take_over(self) -> None:
        """From those whose copy has come as far as we have."""
        with self._run_.table_states.deciding:
            self._pause.look(due=self._write is None and self._is_due())
            self._take_over_decided(self._run_.table_states)

    def _take_over_decided(self, table_states: TableStates) -> None:
        handed = table_states.in_phase(Phase.SYNC_DONE)
        reached = {table: state for table, state in handed.items() if self._slot.confirmed >= (state.lsn or ZERO)}
        if reached:
            # Ready forgets where the table was handed over. An idle position is confirmed without being recorded, and
            # the server may not keep it: without a record the next run could begin before the hand-off.
            if any(self._recorded < (state.lsn or ZERO) for state in reached.values()):
                self._record(self._slot.confirmed)
            self._move_all(dict.fromkeys(reached, READY), only_from=reached)
            for table in reached:
                table_states.succeeded(table)
        waits = len(handed) > len(reached)
        if waits and self._stream is not None and time.monotonic() - self._asked_at > _LOOK_SECONDS:
            # Without traffic the server says how far it is only when asked.
            self._asked_at = time.monotonic()
            self._stream.request_reply()

    def _drain(self) -> None:
        """On an orderly stop: what was read whole is written, recorded and confirmed.

        Trouble while stopping ends it: nothing more was confirmed, so it comes again with the next run.
        """
        if self._stream is None:
            return
        with suppress(ShutdownRequested, TextNeeded):
            self._await_write()
            # A batch that failed and was to be tried again after a pause: nothing behind it may be recorded.
            if self._position > self._slot.confirmed or self._run_.table_states.in_phase(Phase.CATCHUP):
                return
            batch = self._cut()
            if batch is not None and batch.tables:
                self._hand_to_destination(batch)
                self._await_write()

    def _await_write(self) -> None:
        while self._write is not None:
            if self._write.reads_on_until is not None:
                # Nothing more is read: it comes again with the next connection, and what follows it as well.
                self._write = None
                self._run_.table_states.writing(())
                return
            if self._write.again_at is not None:
                self._run_.raise_if_stopped()
            self._wake_up.wait(_LOOK_SECONDS)
            self._finish_write()
