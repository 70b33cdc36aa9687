"""`headwater run` as a process of its own: started, killed, started again, and looked at from outside."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.schema.table import TableName
from headwater.source.slots import apply_slot_name
from headwater.testing.compare import compare_table, confirmed_position, flush_position, wait_until
from headwater.testing.lake_rows import open_lake
from tests.commands import HEADWATER, write_settings
from tests.conftest import Database

PIPELINE_ID = 1


class PipelineFromOutside:
    """A pipeline that runs in another process: its states and positions in the source database, its rows in the lake."""

    def __init__(self, database: Database, warehouse: Path, still_running: Callable[[], None]) -> None:
        """`still_running` raises, with the output of the process, if it has ended."""
        self.database = database
        self.warehouse = warehouse
        self.still_running = still_running

    def wait_ready(self, tables: int, timeout: float = 200.0) -> None:
        wait_until(
            lambda: self.states().count("ready") == tables,
            timeout,
            what=f"{tables} ready tables",
            still_good=self.still_running,
        )

    def states(self) -> list[str]:
        if self.database.value("select to_regclass('headwater.table_states')") is None:
            return []
        return [row[0] for row in self.database.execute("select state->>'phase' from headwater.table_states")]

    def wait_caught_up(self, timeout: float = 240.0) -> None:
        """Wait until everything committed by now has been confirmed."""
        position = flush_position(self.database.connection)
        slot = apply_slot_name(PIPELINE_ID)
        wait_until(
            lambda: confirmed_position(self.database.connection, slot) >= position,
            timeout,
            what="the lake to catch up",
            still_good=self.still_running,
        )

    def wait_received(self, timeout: float = 60.0) -> None:
        """Wait until everything committed by now has reached the process, whatever it has done with it."""
        position = flush_position(self.database.connection)
        received = """select coalesce(max(write_lsn - '0/0'::pg_lsn), 0) from pg_stat_replication
                      join pg_replication_slots on active_pid = pid where slot_name = %s"""
        wait_until(
            lambda: self.database.value(received, [apply_slot_name(PIPELINE_ID)]) >= position,
            timeout,
            what="the changes to be received",
            still_good=self.still_running,
        )

    def assert_equal(self, *tables: str) -> None:
        lake = open_lake(self.warehouse)
        for table in tables:
            compare_table(self.database.connection, TableName("public", table), lake).assert_equal()


class PipelineProcess(PipelineFromOutside):
    """One pipeline of a test's database. Its output is in `output`, for the message of a failed assertion."""

    def __init__(
        self,
        database: Database,
        directory: Path,
        publication: str = "shop",
        extra: str = "",
        verbose: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`environ` is the environment of the process, if not that of the tests."""
        super().__init__(database, directory / "lake", self._check_running)
        self._verbose = verbose
        self._environ = environ
        self._log = directory / "output.txt"
        self.settings_file = write_settings(database, directory, id=PIPELINE_ID, publication=publication, extra=extra)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def connect_through(self, port: int, *more_settings: str) -> None:
        """To the source through a proxy at this port, with more settings of the connection."""
        lines = "\n".join([f"port = {port}", *more_settings])
        text = self.settings_file.read_text()
        self.settings_file.write_text(text.replace(f"port = {self.database.settings.port}", lines))

    def start(self, *, stdout: int | None = None, stderr: int | None = None) -> None:
        """With descriptors of a test's own, what is said there is not in `output`."""
        command = [*HEADWATER, "run", *(["-v"] if self._verbose else []), str(self.settings_file)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log if stdout is None else stdout,
                stderr=log if stderr is None else stderr,
                env=self._environ,
            )

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; its exit status."""
        assert self._process is not None
        self._process.send_signal(how)
        return self.wait()

    def wait(self, timeout: float = 150.0) -> int:
        assert self._process is not None
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the process did not end within {timeout} s\n{self.output}") from None
        self._process = None
        return status

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill_jvm(self) -> None:
        os.kill(self.jvm(), signal.SIGKILL)

    def jvm(self) -> int:
        """The process id of its JVM."""
        assert self._process is not None
        return self._jvm(self._process.pid)

    def signal(self, which: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(which)

    def wait_said(self, text: str, timeout: float = 60.0) -> None:
        wait_until(lambda: text in self.output, timeout, what=f"{text!r} in the output", still_good=self.still_running)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _check_running(self) -> None:
        """Raise with the output if the process has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise AssertionError(f"the process ended with status {self._process.returncode}\n{self.output}")

    @staticmethod
    def _jvm(parent: int) -> int:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for task in Path(f"/proc/{parent}/task").iterdir():
            children += (task / "children").read_text().split()
        for child in {int(child) for child in children}:
            if b"java" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]:
                return child
        raise AssertionError(f"process {parent} has no JVM")


@contextmanager
def pipeline_process(database: Database, directory: Path, **arguments: Any) -> Iterator[PipelineProcess]:
    running = PipelineProcess(database, directory, **arguments)
    try:
        yield running
    finally:
        running.end()
