"""What is shown while a pipeline runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headwater.cli.display import LiveDisplay, PlainDisplay, display_for, render, size
from headwater.observability.progress import Progress


def plain() -> tuple[Progress, PlainDisplay, io.StringIO]:
    progress, out = Progress(lambda: 1000.0), io.StringIO()
    return progress, PlainDisplay(progress, Console(file=out, width=40)), out


def test_a_pipe_gets_plain_lines_and_a_terminal_gets_the_live_table() -> None:
    assert isinstance(display_for(Progress(), Console(file=io.StringIO())), PlainDisplay)
    assert isinstance(display_for(Progress(), Console(file=io.StringIO(), force_terminal=True)), LiveDisplay)


def test_plain_lines_tell_each_state_once_and_are_never_wrapped() -> None:
    progress, display, out = plain()
    progress.table_state(1, "public.orders", "data_sync")
    display.look(with_summary=False)
    display.look(with_summary=True)
    progress.copy_finished(1, rows=1000, seconds=0.5)
    progress.table_state(1, "public.orders", "finished_copy")
    display.look(with_summary=False)
    progress.table_removed(1)
    display.look(with_summary=False)
    assert out.getvalue().splitlines() == [
        "public.orders: data_sync",
        "public.orders: finished_copy (1,000 rows, 2,000 rows/s)",
        "public.orders: no longer in the publication",
    ]


def test_two_tables_that_a_dot_gives_one_name_are_distinguished() -> None:
    progress, display, out = plain()
    progress.table_state(1, "a.b.c", "init")
    progress.table_state(2, "a.b.c", "ready")
    display.look(with_summary=False)
    display.look(with_summary=False)
    assert out.getvalue().splitlines() == ["a.b.c: init", "a.b.c: ready"]


def test_a_summary_comes_only_when_something_changed() -> None:
    progress, display, out = plain()
    progress.batch_applied(changes=500, tables=1, seconds=0.1, newest_commit_time=999.0)
    for _ in range(3):
        display.look(with_summary=True)
    assert out.getvalue().splitlines() == ["500 changes applied; 100/s; lag 0 B, 0.0 s"]


@pytest.mark.promise("the apply worker pauses shortly, and the longest pause is shown")
def test_the_longest_pause_for_a_hand_off_is_shown() -> None:
    progress, display, out = plain()
    progress.batch_applied(changes=500, tables=1, seconds=0.1, newest_commit_time=999.0)
    progress.handed_over(0.25)
    display.look(with_summary=True)
    (line,) = out.getvalue().splitlines()
    assert line.endswith("; longest pause for a hand-off 0.25 s")


def test_names_are_shown_as_they_are_and_not_as_markup() -> None:
    progress, display, out = plain()
    progress.table_state(1, 'public.[red]"x"[/red]', "ready")
    display.look(with_summary=False)
    display.look(with_summary=False)
    assert out.getvalue().splitlines() == ['public.[red]"x"[/red]: ready']


def test_an_error_is_left_to_the_log_and_not_shown_twice() -> None:
    progress, display, out = plain()
    progress.table_state(1, "public.orders", "errored")
    progress.error("public.orders: no room")
    display.look(with_summary=True)
    assert out.getvalue().splitlines() == ["public.orders: errored"]
    Console(file=out, width=100).print(render(progress.snapshot()))
    assert "`headwater tables` shows why" in out.getvalue()
    assert "no room" not in out.getvalue()


def test_leaving_the_plain_display_shows_what_came_last() -> None:
    progress, display, out = plain()
    with display:
        progress.table_state(1, "public.orders", "ready")
    assert "public.orders: ready" in out.getvalue()


def test_the_live_table_shows_errors_first_when_there_is_no_room_for_all() -> None:
    progress, out = Progress(), io.StringIO()
    for number in range(50):
        progress.table_state(number, f"public.t{number:02}", "ready")
    progress.table_state(99, "public.zebra", "errored")
    progress.copy_started(7, 10, 10)
    progress.copy_advanced(7, 0.5)
    Console(file=out, width=100).print(render(progress.snapshot()))
    assert "public.zebra" in out.getvalue()
    assert "and 31 more tables" in out.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (150_000, "150 kB"), (2.5e9, "2.5 GB")],
)
def test_sizes_are_for_people(count: float, text: str) -> None:
    assert size(count) == text


def test_lag_while_the_source_does_not_answer_says_so_also_before_the_first_change() -> None:
    clock = [1000.0]
    progress, out = Progress(lambda: clock[0]), io.StringIO()
    display = PlainDisplay(progress, Console(file=out, width=40))
    progress.position(received=100, confirmed=100, server=100)
    progress.server_at(1_500_100)
    clock[0] += 61
    display.look(with_summary=True)
    assert out.getvalue().splitlines() == [
        "0 changes applied; 0/s; lag at least 1.5 MB, 61.0 s (the source has not answered for 61 s)"
    ]
