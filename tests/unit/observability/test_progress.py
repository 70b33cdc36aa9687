"""Progress: facts in, one consistent snapshot out."""

from __future__ import annotations

import threading

from headwater.observability.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_table_keeps_its_copy_through_its_states() -> None:
    progress = Progress()
    progress.table_state(7, "public.orders", "data_sync")
    progress.copy_started(7, estimated_rows=100, estimated_bytes=5000)
    progress.copy_advanced(7, 1.7)
    (table,) = progress.snapshot().tables
    assert (table.copying, table.copy_fraction, table.estimated_rows) == (True, 1.0, 100)
    progress.copy_finished(7, rows=101, seconds=2.0)
    progress.table_state(7, "public.orders", "ready")
    (table,) = progress.snapshot().tables
    assert (table.state, table.copying, table.copied_rows) == ("ready", False, 101)
    progress.table_removed(7)
    assert progress.snapshot().tables == ()


def test_the_rate_is_of_the_last_seconds_only() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.batch_applied(changes=500, tables=1, seconds=0.1, newest_commit_time=999.0)
    assert progress.snapshot().changes_per_second == 100
    clock.now += 60
    assert (progress.snapshot().changes_per_second, progress.snapshot().changes) == (0, 500)


def test_lag_is_zero_when_caught_up_even_after_an_idle_hour() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.batch_applied(changes=1, tables=1, seconds=0.1, newest_commit_time=999.0)
    progress.position(received=100, confirmed=100, server=100)
    clock.now += 3600
    assert (progress.snapshot().lag_seconds, progress.snapshot().lag_bytes) == (0.0, 0)


def test_after_an_idle_hour_lag_counts_from_when_it_began_and_not_from_the_last_change() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.batch_applied(changes=1, tables=1, seconds=0.1, newest_commit_time=999.0)
    clock.now += 3600
    progress.position(received=100, confirmed=100, server=100)
    clock.now += 2
    progress.position(received=150, confirmed=100, server=200)
    snapshot = progress.snapshot()
    assert (snapshot.lag_seconds, snapshot.lag_bytes) == (2.0, 100)


def test_the_longest_pause_for_a_hand_off_is_remembered_and_no_other_wait_is_one() -> None:
    clock = Clock()
    progress = Progress(clock)
    for seconds in (3.0, 1.0):
        progress.waiting("public.orders to catch up")
        progress.handed_over(seconds)
        progress.waiting(None)
    progress.waiting("the lake")
    clock.now += 60
    progress.waiting(None)
    snapshot = progress.snapshot()
    assert (snapshot.hand_offs, snapshot.longest_pause_seconds, snapshot.waiting) == (2, 3.0, None)


def test_only_the_last_errors_are_kept() -> None:
    progress = Progress()
    for number in range(1000):
        progress.error(f"error {number}")
    assert progress.snapshot().errors[-1] == "error 999"
    assert len(progress.snapshot().errors) < 100


def test_a_waiting_reader_wakes_at_the_report_that_satisfies_it() -> None:
    progress = Progress()
    reporter = threading.Thread(target=lambda: progress.position(received=5, confirmed=5, server=5))
    reporter.start()
    assert progress.wait_for(lambda snapshot: snapshot.confirmed >= 5, timeout=10)
    reporter.join()
    assert not progress.wait_for(lambda snapshot: snapshot.confirmed >= 6, timeout=0.01)


def test_reports_from_many_threads_are_all_counted() -> None:
    progress = Progress()

    def report() -> None:
        for _ in range(200):
            progress.batch_applied(changes=1, tables=1, seconds=0.0, newest_commit_time=0.0)

    threads = [threading.Thread(target=report) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (progress.snapshot().changes, progress.snapshot().batches) == (1600, 1600)
