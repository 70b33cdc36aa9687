"""Names and messages of others reach a log and a terminal as text: no line is forged, nothing is drawn over."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import threading
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from rich.console import Console

from headwater.cli import main as front
from headwater.cli.demo_report import ComparedTable, Steps, show_comparison
from headwater.cli.display import PlainDisplay, render
from headwater.cli.say import say
from headwater.cli.tables import TableLine, _show, _tell
from headwater.errors import HeadwaterError, SchemaError, where_raised
from headwater.observability.log import PlainFormatter
from headwater.observability.outlet import flush
from headwater.observability.progress import Progress
from headwater.observability.text import printable, printable_lines
from headwater.schema.table import TableName
from headwater.states import errored

FORGED = "12:00:00 info engine: everything is ready"
HOSTILE = (
    f"a\x1b[2J\x1b]0;title\x07\r{FORGED}\n{FORGED}\u2028{FORGED}\x85b\x9b31m\u202egnp\u2066\x7f\ud800[red]x[/red]\x00"
)
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def assert_harmless(said: str) -> None:
    assert not CONTROL.search(said), ascii(said)
    assert not any(line.startswith((FORGED, "b", "\u2028")) for line in said.splitlines())
    assert said.encode()


def logged(message: str, *arguments: object, trace: bool = False) -> str:
    error = None
    if trace:
        try:
            raise ValueError(HOSTILE)
        except ValueError as raised:
            error = (type(raised), raised, raised.__traceback__)
    record = logging.LogRecord("headwater.x", logging.INFO, "", 0, message, arguments, error)
    return PlainFormatter().format(record)


def test_what_would_not_show_as_itself_is_an_escape_and_the_rest_stays() -> None:
    assert printable("a\tb\n\x1b[0m\x85\u202e\U000e0041\ud800") == r"a\tb\n\x1b[0m\x85\u202e\U000e0041\ud800"
    assert printable('Ünser "Pub", it\'s 表 `x` $y \\n 😀 é') == 'Ünser "Pub", it\'s 表 `x` $y \\n 😀 é'
    assert printable_lines("one\ntwo\r\nthree") == "one\ntwo\\r\nthree"


def test_every_control_character_is_escaped() -> None:
    for code in [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xD800, 0xDFFF]:
        assert printable(chr(code)).isascii()
        assert printable(chr(code)).isprintable()


@pytest.mark.parametrize(
    "argument", [HOSTILE, TableName("public", HOSTILE), ValueError(HOSTILE), HeadwaterError(HOSTILE, detail=HOSTILE)]
)
def test_no_line_of_the_log_can_be_forged_by_a_name_or_an_error(argument: object) -> None:
    said = logged("table %s: no", argument)
    assert_harmless(said)
    assert all(line.startswith(" ") for line in said.splitlines()[1:])


def test_a_traceback_and_a_message_without_arguments_are_escaped_too() -> None:
    assert_harmless(logged(f"table {HOSTILE}"))
    said = logged("failed", trace=True)
    assert_harmless(said)
    assert "ValueError" in said


def test_a_secret_with_a_newline_is_found_in_an_argument_and_in_the_message() -> None:
    for message, arguments in (("with %s", ("hun\nter2",)), ("with hun\nter2", ())):
        record = logging.LogRecord("headwater.x", logging.INFO, "", 0, message, arguments, None)
        assert PlainFormatter(["hun\nter2"]).format(record).endswith("x: with ***")


def test_numbers_are_formatted_as_before_and_the_lines_of_a_trace_stay_lines() -> None:
    assert logged("%d rows, %.1f s, %s", 3, 0.25, None).endswith("x: 3 rows, 0.2 s, None")
    assert logged("%(a)s", {"a": "b\nc"}).endswith(r"x: b\nc")
    with pytest.raises(ValueError, match="x") as raised:
        raise ValueError("x")
    assert len(logged("failed: %s", where_raised(raised.value)).splitlines()) > 1


def test_an_error_of_ours_keeps_its_three_parts_in_the_log() -> None:
    lines = logged("table %s: %s", "t", HeadwaterError("no", detail="one\ntwo", hint="Do this.")).splitlines()
    assert lines[0].endswith("x: table t: no")
    assert lines[1:] == ["  detail: one", "          two", "  hint: Do this."]


def test_an_error_of_the_command_line_shows_no_escape_sequence_and_no_forged_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    front.show_error(HeadwaterError(f"{HOSTILE}\nhint: rm", detail=HOSTILE, hint=HOSTILE))
    assert flush()
    said = capsys.readouterr().err
    assert_harmless(said)
    assert [line.partition(":")[0] for line in said.splitlines() if not line.startswith(" ")] == [
        "error",
        "detail",
        "hint",
    ]


def test_plain_lines_and_the_live_table_show_names_as_text() -> None:
    progress, out = Progress(), io.StringIO()
    progress.table_state(1, HOSTILE, "ready")
    progress.missed(1, 3)
    progress.waiting(HOSTILE)
    progress.batch_applied(changes=5, tables=1, seconds=0.1, newest_commit_time=999.0)
    PlainDisplay(progress, Console(file=out, width=40)).look(with_summary=True)
    assert_harmless(out.getvalue())
    assert "[red]x[/red]" in out.getvalue()
    progress.table_removed(1)
    live = io.StringIO()
    progress.table_state(2, HOSTILE, "errored")
    progress.missed(2, 3)
    Console(file=live, width=400).print(render(progress.snapshot()))
    assert_harmless(live.getvalue())
    assert "[red]x[/red]" in live.getvalue()


@pytest.mark.parametrize("width", [60, 400])
def test_headwater_tables_shows_names_reasons_and_hints_as_text(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    error = SchemaError(f"no {HOSTILE}", detail=f"x\n{FORGED}", hint=HOSTILE)
    lines = [TableLine(HOSTILE, errored(error), "")]
    out = io.StringIO()
    _show(Console(file=out, width=width), lines)
    assert not CONTROL.search(out.getvalue())
    _tell(lines)
    said = capsys.readouterr().out
    assert_harmless(said)
    assert all(line.startswith("  ") for line in said.splitlines()[1:])
    assert "[red]x[/red]" in said


def test_the_demos_report_shows_names_as_text_and_not_as_markup() -> None:
    out = io.StringIO()
    console = Console(file=out, width=400)
    show_comparison(console, [ComparedTable(HOSTILE, 1, 0, 0, 0)])
    Steps(console).done(HOSTILE, "[bold]y[/bold]", 1.0)
    assert_harmless(out.getvalue())
    assert out.getvalue().count("[red]x[/red]") == 2
    assert "[bold]y[/bold]" in out.getvalue()


def on_a_terminal(call: Callable[[], None]) -> bytes:
    """What a terminal gets on standard output."""
    ours, theirs = pty.openpty()
    read: list[bytes] = []

    def reads() -> None:
        try:
            while chunk := os.read(ours, 65536):
                read.append(chunk)
        except OSError:
            pass

    thread = threading.Thread(target=reads)
    thread.start()
    saved = os.dup(1)
    os.dup2(theirs, 1)
    try:
        call()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(theirs)
        thread.join(60)
        os.close(ours)
    return b"".join(read)


def test_a_real_terminal_gets_no_escape_sequence_of_a_name(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        said = on_a_terminal(lambda: click.echo(printable(HOSTILE), file=open(1, "w", closefd=False)))  # noqa: SIM115
    assert b"\x1b" not in said
    assert said.count(b"\n") == 1


def test_whatever_a_command_says_goes_through_one_function() -> None:
    cli = Path(front.__file__).parent
    for path in cli.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        allowed = {"say.py": 1, "main.py": 1}.get(path.name, 0)
        assert text.count("click.echo(") == allowed, path


def test_say_keeps_a_text_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    said = capsys.readouterr().out
    assert_harmless(said)
    assert said.count("\n") == 1
