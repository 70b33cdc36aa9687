"""A physical standby of an embedded server: for tests of failover, and of a standby as the source."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from psycopg import sql

from headwater.errors import HeadwaterError
from headwater.testing.postgres import PostgresServer
from headwater.testing.runtime import ServerUser, runtime_directory
from headwater.testing.template import server_environment

PHYSICAL_SLOT = "standby"
_WAIT_SECONDS = 60.0


@contextmanager
def standby_of(
    primary: PostgresServer, *, settings: Mapping[str, str] | None = None, slot: str = PHYSICAL_SLOT
) -> Iterator[PostgresServer]:
    """A standby that follows the primary over a physical slot and gives feedback; its files go with it."""
    user = ServerUser.current()
    base = runtime_directory() / "standbys"
    base.mkdir(mode=0o755, exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=base, prefix=""))
    try:
        directory.chmod(0o755)
        user.own(directory)
        _back_up(primary, user, directory / "data", slot)
        chosen = {
            "primary_conninfo": f"host={primary.host} port={primary.port} user={primary.superuser} dbname=postgres",
            "primary_slot_name": slot,
            "hot_standby_feedback": "on",
            "wal_receiver_status_interval": "1",
            "wal_retrieve_retry_interval": "100ms",
            **(settings or {}),
        }
        password = primary.settings().password
        with PostgresServer.start(
            version=primary.version // 10_000,
            settings=chosen,
            directory=directory,
            password=password.reveal() if password is not None else None,
        ) as standby:
            yield standby
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _back_up(primary: PostgresServer, user: ServerUser, target: Path, slot: str) -> None:
    command = [str(primary.program("pg_basebackup")), f"--pgdata={target}", "--checkpoint=fast", "--no-sync"]
    command += [f"--host={primary.host}", f"--port={primary.port}", f"--username={primary.superuser}"]
    command += ["--create-slot", f"--slot={slot}", "--wal-method=stream"]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=target.parent, env=server_environment(), **user.process_arguments()
    )
    if run.returncode != 0:
        raise HeadwaterError(
            "a standby could not be created", detail=run.stderr.strip(), hint="See the output of pg_basebackup above."
        )
    signal = target / "standby.signal"
    signal.touch()
    user.own(signal)


def promote(standby: PostgresServer) -> None:
    """Make it a primary; returns once it takes writes."""
    with standby.connect() as connection:
        connection.execute("select pg_promote(true)")


def stop_following(standby: PostgresServer) -> None:
    """From here on it gets nothing from its primary: what is promoted then lacks what was committed since."""
    with standby.connect() as connection:
        connection.execute("alter system set primary_conninfo = ''")
        connection.execute("select pg_reload_conf()")
        _wait_for(standby, "select not exists (select from pg_stat_wal_receiver)")


def wait_replayed(primary: PostgresServer, standby: PostgresServer) -> None:
    """Until the standby shows everything that the primary has flushed by now."""
    with primary.connect() as connection:
        row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    _wait_for(standby, sql.SQL("select pg_last_wal_replay_lsn() >= {}::pg_lsn").format(row[0]))


def wait_synced(primary: PostgresServer, standby: PostgresServer, slot: str, position: str) -> None:
    """Until the standby keeps a copy of the slot that has come at least as far. Its reader must be at work.

    On quiet servers that takes half a minute by itself: a copy begins only where the primary has logged its running
    transactions and the reader has confirmed that, and the slot sync worker sleeps longer and longer. So both are triggered.
    """
    query = sql.SQL(
        "select count(*) = 1 from pg_replication_slots where slot_name = {} and synced and not temporary"
        " and confirmed_flush_lsn >= {}::pg_lsn"
    )
    with primary.connect() as above, standby.connect() as below:

        def nudge() -> None:
            above.execute("select pg_log_standby_snapshot()")
            below.execute("select pg_reload_conf()")
            time.sleep(0.1)

        _wait_for(standby, query.format(slot, position), nudge)


def log_standby_snapshot(primary: PostgresServer) -> None:
    """Log what the creation of a slot on a standby waits for."""
    with primary.connect() as connection:
        connection.execute("select pg_log_standby_snapshot()")


def _wait_for(server: PostgresServer, query: str | sql.Composable, nudge: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    with server.connect() as connection:
        while connection.execute(query).fetchone() != (True,):  # type: ignore[arg-type]
            if time.monotonic() > deadline:
                raise HeadwaterError(
                    "the standby does not replay as far as expected",
                    detail=server.log[-2000:],
                    hint="The end of its log is in the detail; a standby that lost its primary says so there.",
                )
            nudge()
            # A standby does not signal what it has replayed.
            time.sleep(0.02)
