"""Progress: facts in, one consistent snapshot out."""

from __future__ import annotations

import threading

import pytest

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


@pytest.mark.promise("the apply worker pauses shortly, and the longest pause is shown")
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
    assert progress.wait_for(lambda snapshot: snapshot.confirmed >= 5, timeout=60)
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


def test_lag_is_counted_to_where_the_server_is_and_not_to_what_was_received() -> None:
    progress = Progress()
    progress.server_at(5_000)
    assert progress.snapshot().lag_bytes == 0, "nothing is known of our own position yet"
    progress.position(received=1_100, confirmed=1_000, server=1_100)
    assert progress.snapshot().lag_bytes == 4_000
    progress.position(received=5_200, confirmed=5_200, server=5_200)
    assert progress.snapshot().lag_bytes == 0


def test_lag_does_not_fall_while_the_server_is_out_of_contact_and_its_seconds_count_from_the_last_contact() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.position(received=1_000, confirmed=1_000, server=1_000)
    progress.server_at(9_000)
    # A new connection begins at what is confirmed: received falls back, the server does not.
    progress.position(received=1_000, confirmed=1_000, server=1_000)
    clock.now += 60
    snapshot = progress.snapshot()
    assert (snapshot.lag_bytes, snapshot.lag_seconds, snapshot.no_contact_seconds) == (8_000, 60.0, 60.0)


def test_a_caught_up_pipeline_whose_source_is_unreachable_has_a_lag_that_grows() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.position(received=1_000, confirmed=1_000, server=1_000)
    progress.server_at(1_000)
    clock.now += 4
    assert (progress.snapshot().lag_seconds, progress.snapshot().no_contact_seconds) == (0.0, None)
    clock.now += 56
    assert (progress.snapshot().lag_seconds, progress.snapshot().no_contact_seconds) == (60.0, 60.0)
    progress.server_at(1_000)
    assert (progress.snapshot().lag_seconds, progress.snapshot().no_contact_seconds) == (0.0, None)


def test_a_server_that_is_behind_the_last_one_is_believed() -> None:
    progress = Progress()
    progress.position(received=1_000, confirmed=1_000, server=1_000)
    progress.server_at(9_000)
    progress.server_at(1_500)
    assert progress.snapshot().lag_bytes == 500


def test_lag_does_not_follow_a_wall_clock_that_is_set_back_or_forth() -> None:
    clock, wall = Clock(), Clock()
    progress = Progress(clock, wall)
    progress.position(received=200, confirmed=100, server=200)
    progress.batch_applied(changes=1, tables=1, seconds=0.1, newest_commit_time=wall.now - 3)
    for step in (-86_400, 86_400 * 2):
        wall.now += step
        assert progress.snapshot().lag_seconds == 3.0
    clock.now += 2
    assert progress.snapshot().lag_seconds == 5.0
