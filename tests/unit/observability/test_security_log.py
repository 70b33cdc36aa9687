"""Log and output to streams that take nothing: no thread waits, everything ends, and nothing is lost while the stream is read.

Each in a process of its own, with pipes and terminals as the system has them.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.blocked_pipe import BlockedPipe, blocked_pipe

ENDS_SECONDS = 30.0

# A command of the command line that does `work`, so that the process begins and ends as `headwater run` does.
COMMAND = """
import logging, os, sys, threading, time
from pathlib import Path
import click
from rich.console import Console
from headwater.cli import main as front
from headwater.cli.display import display_for
from headwater.cli.signals import StopSignals
from headwater.errors import HeadwaterError
from headwater.observability import log as logs
from headwater.observability.progress import Progress

log = logging.getLogger("headwater.engine.apply")
done = Path(sys.argv[1])

def console():
    try:
        from headwater.observability.outlet import standard_output
    except ImportError:
        return Console()
    return Console(file=standard_output())

@click.command()
def command():
    logs.configure(logging.INFO)
    work()

def work():
    {work}

front.LazyGroup.get_command = lambda self, context, name: command
front.main(["run"])
"""


def start(work: str, done: Path, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    program = COMMAND.replace("{work}", "\n    ".join(work.strip().splitlines()))
    environment = {**os.environ, "TERM": "xterm"}
    return subprocess.Popen([sys.executable, "-c", program, str(done)], stdout=stdout, stderr=stderr, env=environment)


def ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(ENDS_SECONDS)
    finally:
        process.kill()
        process.wait()


def said(work: str, done: Path) -> tuple[int, str]:
    """Exit status, and all of standard error, of a process that is read as usual."""
    process = start(work, done, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, text = process.communicate(timeout=ENDS_SECONDS)
    finally:
        process.kill()
    return process.returncode, text.decode()


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + ENDS_SECONDS
    while not path.exists():
        assert process.poll() is None, f"ended with status {process.returncode}"
        assert time.monotonic() < deadline, "the process is blocked"
        time.sleep(0.02)


LOGS_FROM_THREADS = """
def entries():
    for number in range(2000):
        log.warning("entry %d %s", number, "x" * 100)
threads = [threading.Thread(target=entries) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
done.touch()
"""


def test_a_standard_error_that_takes_nothing_stops_no_thread_and_not_the_end(tmp_path: Path) -> None:
    with blocked_pipe() as pipe:
        process = start(LOGS_FROM_THREADS, tmp_path / "done", stdout=subprocess.DEVNULL, stderr=pipe.writer)
        try:
            wait_for(tmp_path / "done", process)
            assert pipe.is_full
        finally:
            status = ended(process)
    assert status == 0


def test_an_error_ends_a_process_whose_standard_error_takes_nothing(tmp_path: Path) -> None:
    with blocked_pipe() as pipe:
        work = "raise HeadwaterError('no', detail='x' * 10_000)"
        status = ended(start(work, tmp_path / "done", stdout=subprocess.DEVNULL, stderr=pipe.writer))
    assert status == 1


def test_what_was_dropped_is_counted_once_there_is_room(tmp_path: Path) -> None:
    work = """
from headwater.observability import outlet
outlet.STANDARD_ERROR._most_bytes = 20_000
for number in range(1000):
    log.warning("entry %d %s", number, "x" * 100)
done.touch()
while not done.with_name("go").exists(): time.sleep(0.02)
outlet.flush()
log.warning("the last entry")
"""
    with blocked_pipe() as pipe:
        process = start(work, tmp_path / "done", stdout=subprocess.DEVNULL, stderr=pipe.writer)
        try:
            wait_for(tmp_path / "done", process)
            reading = pipe.start_reading()
            (tmp_path / "go").touch()
        finally:
            status = ended(process)
        pipe.close_writer()
        text = reading.read_to_end()
    assert status == 0
    written = [int(number) for number in re.findall(r"warning engine apply: entry (\d+)", text)]
    dropped = [int(count) for count in re.findall(r"(\d+) entries were dropped", text)]
    assert written == list(range(len(written)))
    assert 0 < len(written) < 1000
    assert len(written) + sum(dropped) == 1000
    assert text.splitlines()[-1].endswith("the last entry")


def test_entries_are_bounded_by_count_too(tmp_path: Path) -> None:
    with blocked_pipe() as pipe:
        work = """
from headwater.observability import outlet
for number in range(outlet.MOST_TEXTS + 1000):
    outlet.STANDARD_ERROR.put("")
assert len(outlet.STANDARD_ERROR._texts) <= outlet.MOST_TEXTS + 1
done.touch()
"""
        # Empty texts are written at once, so a first one has to keep the writer waiting.
        work = "log.warning('first')\n" + work.strip()
        process = start(work, tmp_path / "done", stdout=subprocess.DEVNULL, stderr=pipe.writer)
        status = ended(process)
    assert (status, (tmp_path / "done").exists()) == (0, True)


def test_nothing_is_lost_at_an_ordinary_end(tmp_path: Path) -> None:
    status, text = said("for number in range(5000): log.warning('entry %d', number)", tmp_path / "done")
    assert status == 0
    assert re.findall(r"entry (\d+)", text) == [str(number) for number in range(5000)]


def test_nothing_is_lost_when_an_error_ends_the_process_and_the_error_comes_last(tmp_path: Path) -> None:
    work = """
for number in range(5000): log.warning('entry %d', number)
raise HeadwaterError('it failed', detail='why', hint='what to do')
"""
    status, text = said(work, tmp_path / "done")
    assert status == 1
    assert text.count("warning engine apply: entry") == 5000
    assert text.splitlines()[-3:] == ["error: it failed", "detail: why", "hint: what to do"]


def test_nothing_is_lost_when_a_defect_ends_the_process(tmp_path: Path) -> None:
    work = "for number in range(5000): log.warning('entry %d', number)\nraise RuntimeError('a defect')"
    status, text = said(work, tmp_path / "done")
    assert status == 1
    assert text.count("warning engine apply: entry") == 5000
    assert text.rstrip().endswith("RuntimeError: a defect")


def test_what_a_defect_says_is_escaped_and_indented_in_whatever_thread(tmp_path: Path) -> None:
    work = """
def fail(): raise RuntimeError("why\\n12:00:00 warning apply: forged\\x1b[2K")
thread = threading.Thread(target=fail, name="work\\x1b[1m")
thread.start(); thread.join()
fail()
"""
    status, text = said(work, tmp_path / "done")
    assert status == 1
    assert text.count("RuntimeError: why") == 2
    assert text.count("\n  12:00:00 warning apply: forged\\x1b[2K") == 2
    assert "\x1b" not in text
    assert r"thread work\x1b[1m ended" in text


def test_nothing_is_lost_when_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    work = """
with StopSignals(lambda: done.with_name("asked").touch()):
    for number in range(5000): log.warning('entry %d', number)
    done.touch()
    time.sleep(60)
"""
    process = start(work, tmp_path / "done", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    # All of it is read while it is written: a pipe is small.
    with process.stderr as stream:
        pipe_text = b""
        while b"entry 4999\n" not in pipe_text:
            pipe_text += os.read(stream.fileno(), 1 << 16)
        process.send_signal(signal.SIGTERM)
        wait_for(tmp_path / "asked", process)
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 128 + signal.SIGTERM
    assert pipe_text.count(b"warning engine apply: entry") == 5000


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_ends_a_process_whose_standard_error_takes_nothing(tmp_path: Path, signals: int) -> None:
    work = """
stop = threading.Event()
def request_stop():
    done.with_name("asked").touch()
    if {once}: stop.set()
with StopSignals(request_stop):
    log.warning("entry")
    done.touch()
    stop.wait(60)
"""
    work = work.replace("{once}", str(signals == 1))
    with blocked_pipe() as pipe:
        process = start(work, tmp_path / "done", stdout=subprocess.DEVNULL, stderr=pipe.writer)
        try:
            wait_for(tmp_path / "done", process)
            process.send_signal(signal.SIGTERM)
            wait_for(tmp_path / "asked", process)
            if signals == 2:
                process.send_signal(signal.SIGTERM)
        finally:
            status = ended(process)
    assert status == (0 if signals == 1 else 128 + signal.SIGTERM)


def test_an_entry_shows_its_arguments_as_they_were_when_it_was_logged(tmp_path: Path) -> None:
    work = """
seen = []
for number in range(200):
    seen.append(number)
    log.warning("seen %s", seen)
    seen.clear()
"""
    status, text = said(work, tmp_path / "done")
    assert status == 0
    assert re.findall(r"seen \[(\d*)\]", text) == [str(number) for number in range(200)]


SHOWS = """
progress = Progress()
screen = console()
with display_for(progress, screen):
    for number in range(300):
        progress.table_state(1, "public.orders", f"state{number}")
        screen.print("line", number)
        log.warning("entry %d", number)
    done.touch()
screen.print("stopped")
"""


def test_a_standard_output_that_takes_nothing_stops_neither_the_display_nor_the_end(tmp_path: Path) -> None:
    with blocked_pipe() as out, blocked_pipe() as error:
        process = start(SHOWS, tmp_path / "done", stdout=out.writer, stderr=error.writer)
        try:
            wait_for(tmp_path / "done", process)
        finally:
            status = ended(process)
    assert status == 0


def test_a_terminal_that_takes_nothing_stops_neither_the_live_display_nor_the_end(tmp_path: Path) -> None:
    """As after Ctrl-S: everything goes to one terminal, and the live display's own thread draws all the time."""
    ours, theirs = pty.openpty()
    try:
        process = start(SHOWS, tmp_path / "done", stdout=theirs, stderr=theirs)
        try:
            wait_for(tmp_path / "done", process)
        finally:
            status = ended(process)
    finally:
        os.close(ours)
        os.close(theirs)
    assert status == 0


def test_a_standard_output_and_error_that_are_gone_do_not_change_the_exit_status(tmp_path: Path) -> None:
    out, error = BlockedPipe(filled=False), BlockedPipe(filled=False)
    out.close_reader()
    error.close_reader()
    try:
        process = start(SHOWS, tmp_path / "done", stdout=out.writer, stderr=error.writer)
        status = ended(process)
    finally:
        out.close()
        error.close()
    assert (status, (tmp_path / "done").exists()) == (0, True)


def test_lines_of_a_display_that_is_read_come_whole_and_in_order(tmp_path: Path) -> None:
    process = start(SHOWS, tmp_path / "done", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    text, _ = process.communicate(timeout=ENDS_SECONDS)
    assert process.returncode == 0
    lines = text.decode().splitlines()
    assert [line for line in lines if line.startswith("line ")] == [f"line {number}" for number in range(300)]
    assert lines[-1] == "stopped"
