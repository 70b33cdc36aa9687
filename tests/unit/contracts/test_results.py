from __future__ import annotations

import threading

import pytest

from headwater.contracts.results import PendingResult, WriteEventsResult
from headwater.errors import DestinationError, LakeCommitUnknown, ShutdownRequested


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
    other.failed(ValueError("seven"))
    with pytest.raises(DestinationError, match="failed in write_events") as caught:
        PendingResult(other).wait()
    assert "ValueError: seven" in caught.value.detail
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
