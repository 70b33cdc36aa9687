"""One run of a pipeline at a time, on a real server."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from headwater.engine.run_lock import RunLock
from headwater.errors import PipelineLocked, StoreUnavailable
from headwater.secret import Secret
from headwater.source.lock import PipelineLock
from headwater.store.memory import MemoryStore


def test_invariant_6_a_second_run_is_refused_with_the_holders_name(database: Any) -> None:
    first, second = PipelineLock(database.settings, 5), PipelineLock(database.settings, 5)
    first.acquire()
    try:
        start = time.monotonic()
        with pytest.raises(PipelineLocked, match="already running") as error:
            second.acquire(wait_seconds=0.3)
        assert time.monotonic() - start < 5
        assert "headwater_lock_5" in error.value.detail
        assert not second.held
        with pytest.raises(PipelineLocked, match="in this process"):
            first.acquire()
        first.check()
    finally:
        first.release()
    second.acquire()
    second.release()


@pytest.mark.parametrize("pipeline_id", [0, 2**31, 2**32 - 1, 2**63 - 1])
def test_pipelines_of_other_numbers_are_not_in_the_way(database: Any, pipeline_id: int) -> None:
    one, other = PipelineLock(database.settings, pipeline_id), PipelineLock(database.settings, 77)
    one.acquire()
    other.acquire(wait_seconds=0.1)
    with pytest.raises(PipelineLocked) as error:
        PipelineLock(database.settings, pipeline_id).acquire(wait_seconds=0.1)
    assert f"headwater_lock_{pipeline_id}" in error.value.detail
    one.release()
    other.release()


def test_a_lock_is_waited_for_a_little(database: Any) -> None:
    first, second = PipelineLock(database.settings, 5), PipelineLock(database.settings, 5)
    first.acquire()
    timer = threading.Timer(0.3, first.release)
    timer.start()
    second.acquire(wait_seconds=60)
    second.check()
    second.release()
    timer.join()


@pytest.mark.invariant(6)
def test_a_lost_session_is_a_lost_lock(database: Any) -> None:
    lock = PipelineLock(database.settings, 5)
    lock.acquire()
    lock.check()
    database.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'headwater_lock_5'"
        " and datname = current_database()"
    )
    with pytest.raises(PipelineLocked, match="was lost"):
        lock.check()
    assert not lock.held
    lock.release()
    lock.release()
    with pytest.raises(PipelineLocked, match="was lost"):
        lock.check()
    lock.acquire()
    lock.release()


def test_over_a_unix_socket_too(database: Any) -> None:
    lock = PipelineLock(database.server.settings(database.name, tcp=False), 5)
    lock.acquire()
    lock.check()
    lock.release()


def test_a_killed_run_does_not_keep_its_successor_out(database: Any) -> None:
    settings = database.server.settings(database.name, tcp=False)
    program = (
        "import sys\nfrom headwater.source.lock import PipelineLock\nfrom headwater.wire.settings import ConnectSettings\n"
        "lock = PipelineLock(ConnectSettings(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]), 5)\n"
        "lock.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    arguments = [settings.host, str(settings.port), settings.database, settings.username]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"held\n"
        run.kill()
    lock = PipelineLock(settings, 5)
    lock.acquire()
    lock.release()


def end_session_of(database: Any, pipeline_id: int) -> None:
    database.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = %s",
        [f"headwater_lock_{pipeline_id}"],
    )


@pytest.mark.security
def test_a_role_that_may_end_no_session_takes_its_lock_again(database: Any) -> None:
    role = f"plain_{database.name}"
    database.execute(
        f"create role {role} login password 'x'; revoke execute on function pg_terminate_backend from public"
    )
    lock = PipelineLock(replace(database.settings, username=role, password=Secret("x")), 6)
    try:
        lock.acquire()
        end_session_of(database, 6)
        lock.release()
        lock.acquire()
        lock.check()
    finally:
        lock.release()
        database.execute(f"grant execute on function pg_terminate_backend to public; drop role {role}")


@pytest.mark.security
def test_a_lock_that_is_held_again_is_in_reach_also_while_the_store_is_not(database: Any) -> None:
    """Streams are left while it is out of reach; here sessions can be opened, and only the store cannot be asked."""

    class Away(MemoryStore):
        def check_run(self) -> None:
            raise StoreUnavailable("the store is away", hint="It is tried again.")

    now = [0.0]
    lock = RunLock(PipelineLock(database.settings, 8), Away(), "token", clock=lambda: now[0])
    lock.acquire()
    lock.begin()
    try:
        end_session_of(database, 8)
        for _ in range(4):
            assert not lock.verify()
            now[0] += 1
        assert not lock.is_held
        assert not lock.is_out_of_reach()
    finally:
        lock.release()
