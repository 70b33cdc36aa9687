from __future__ import annotations

import threading

import pytest

from headwater.contracts.results import PendingResult, WriteEventsResult
from headwater.engine.destination_calls import call
from headwater.errors import DestinationError, LakeCommitUnknown, Retry, ShutdownRequested
from headwater.schema.table import TableId


def test_a_completed_handle_ends_the_wait() -> None:
    result = WriteEventsResult()
    pending = PendingResult(result)
    threading.Thread(target=result.done).start()
    pending.wait(threading.Event())


def test_a_dropped_handle_is_a_destination_error() -> None:
    result = WriteEventsResult()
    pending = PendingResult(result)
    del result
    with pytest.raises(DestinationError, match="dropped the result of write_events"):
        pending.wait()


def test_a_failure_of_ours_is_passed_on_and_any_other_is_explained() -> None:
    result = WriteEventsResult()
    result.failed(LakeCommitUnknown("who knows"))
    with pytest.raises(LakeCommitUnknown):
        PendingResult(result).wait()
    other = WriteEventsResult()
    other.failed(OSError("seven"))
    with pytest.raises(DestinationError, match="failed in write_events") as caught:
        PendingResult(other).wait()
    assert "OSError: seven" in caught.value.detail
    assert caught.value.hint


def test_only_the_first_completion_counts() -> None:
    result = WriteEventsResult()
    result.done()
    result.failed(ValueError("late"))
    PendingResult(result).wait()


def test_shutdown_interrupts_the_wait() -> None:
    result, stop = WriteEventsResult(), threading.Event()
    stop.set()
    with pytest.raises(ShutdownRequested):
        PendingResult(result).wait(stop)


def test_a_listener_is_called_when_it_is_done_and_at_once_if_it_was() -> None:
    result, called = WriteEventsResult(), threading.Event()
    pending = PendingResult(result)
    pending.on_done(called.set)
    assert not called.is_set()
    result.done()
    assert called.is_set()
    again = threading.Event()
    pending.on_done(again.set)
    assert again.is_set()


def test_a_method_that_returns_without_completing_and_keeps_nothing_is_a_destination_error() -> None:
    pending = call("test", WriteEventsResult(), lambda result: None)
    with pytest.raises(DestinationError, match="dropped the result of write_events") as caught:
        pending.wait()
    assert "result.done()" in caught.value.hint


def test_what_a_method_raises_is_its_failure_even_after_it_kept_the_handle() -> None:
    kept = []

    def method(result: WriteEventsResult) -> None:
        kept.append(result)
        raise ValueError("seven")

    pending = call("test", WriteEventsResult(), method)
    with pytest.raises(DestinationError, match="failed in write_events"):
        pending.wait()


def test_a_handle_that_is_kept_may_be_completed_later_from_anywhere() -> None:
    kept: list[WriteEventsResult] = []
    returned = threading.Event()

    def method(result: WriteEventsResult) -> None:
        kept.append(result)
        returned.set()

    pending = call("test", WriteEventsResult(), method)
    assert returned.wait(60)
    assert not pending.done
    kept.pop().done()
    pending.wait()


def test_a_handle_that_is_dropped_later_is_a_destination_error_then() -> None:
    kept: list[WriteEventsResult] = []
    pending = call("test", WriteEventsResult(), kept.append)
    while not kept:
        assert not pending.done
    kept.clear()
    with pytest.raises(DestinationError, match="dropped"):
        pending.wait()


def test_a_missed_deadline_is_a_destination_error_with_manual_retry_and_late_completion_is_ignored() -> None:
    result = WriteEventsResult()
    pending = PendingResult(result, deadline_seconds=0.01)
    with pytest.raises(DestinationError, match="missed the deadline of write_events") as caught:
        pending.wait()
    assert caught.value.retry is Retry.MANUAL
    assert "destination_deadline_ms" in caught.value.hint
    result.done()
    with pytest.raises(DestinationError, match="missed the deadline"):
        pending.wait()


def test_a_deadline_is_seen_without_waiting_and_not_before_its_time() -> None:
    result = WriteEventsResult()
    assert not PendingResult(result, deadline_seconds=3600).done
    assert PendingResult(result, deadline_seconds=0).done
    kept = WriteEventsResult()
    kept.done()
    PendingResult(kept, deadline_seconds=0).wait()


def test_named_tables_may_fail_while_the_rest_is_durable() -> None:
    result = WriteEventsResult()
    pending = PendingResult(result)
    result.failed_tables({TableId(1): OSError("seven"), TableId(2): DestinationError("ours")})
    pending.wait()
    assert set(pending.table_errors) == {TableId(1), TableId(2)}
    assert "OSError: seven" in pending.table_errors[TableId(1)].detail
    assert pending.table_errors[TableId(2)].message == "ours"
