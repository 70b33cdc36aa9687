"""The first signal asks, the second insists."""

from __future__ import annotations

import os
import signal
import threading

from headwater.cli.signals import STOP_SIGNALS, StopSignals


def test_the_first_signal_requests_a_stop_once_and_the_second_gives_up() -> None:
    asked, gave_up = threading.Event(), threading.Event()
    statuses: list[int] = []
    before = [signal.getsignal(number) for number in STOP_SIGNALS]

    def give_up(status: int) -> None:
        statuses.append(status)
        gave_up.set()

    with StopSignals(asked.set, give_up) as signals:
        assert not signals.requested.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(60)
        assert signals.requested.is_set()
        assert not gave_up.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert gave_up.wait(60)
    assert statuses == [128 + signal.SIGINT]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_stop_that_blocks_does_not_keep_the_second_signal_from_being_heard() -> None:
    release, gave_up = threading.Event(), threading.Event()
    asked = threading.Event()

    def blocks() -> None:
        asked.set()
        release.wait(30)

    with StopSignals(blocks, lambda status: gave_up.set()):
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        assert gave_up.wait(60)
    release.set()


def test_handlers_that_were_replaced_are_installed_again() -> None:
    asked = threading.Event()
    with StopSignals(asked.set) as signals:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signals.arm()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.wait(60)
