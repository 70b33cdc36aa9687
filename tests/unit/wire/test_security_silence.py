"""A server that says nothing, by the clock of one session: a scripted one, in tenths of a second."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from headwater.engine.follow.slot_stream import SilenceLimit, SlotStream, StreamOptions
from headwater.errors import ConnectionLost
from headwater.lsn import EndLsn
from headwater.source import session
from headwater.wire.connection import WireConnection, ask_about
from headwater.wire.messages import frame
from headwater.wire.patience import Patience, ServerSilent, Verdict
from headwater.wire.probe import what_became_of
from headwater.wire.replication import ReplicationStream
from headwater.wire.settings import ConnectSettings
from tests.unit.wire.test_connection_session import STREAM, greeted, keepalive, read_message, serving

SETTINGS = ConnectSettings("db", 5432, "shop", "reader", answer_timeout_seconds=0.2)


def until_closed(peer: socket.socket) -> None:
    while peer.recv(4096):
        pass


def read_for_ever(stream: ReplicationStream) -> None:
    while True:
        stream.read(1.0)


def test_a_stream_without_the_requested_reply_is_given_up() -> None:
    asked: list[bool] = []

    def script(peer: socket.socket) -> None:
        greeted(peer)
        read_message(peer)
        peer.sendall(STREAM)
        while True:
            try:
                status = read_message(peer)
            except ConnectionError:
                return
            asked.append(status[-1] == 1)

    with serving(script) as settings, WireConnection.connect(settings) as connection:
        stream = connection.start_replication("s", EndLsn(1), {}, silence_seconds=0.4)
        assert stream.read(1.0) is not None
        with pytest.raises(ServerSilent) as caught:
            read_for_ever(stream)
        assert caught.value.hint
        assert connection.closed
    assert asked[-1], "a reply was asked for before the stream was left"


def test_a_stream_whose_server_replies_is_never_left() -> None:
    done = threading.Event()

    def script(peer: socket.socket) -> None:
        greeted(peer)
        read_message(peer)
        peer.sendall(STREAM)
        answers = 0
        while answers < 3:
            if read_message(peer)[-1] == 1:
                answers += 1
                peer.sendall(keepalive(140 + answers))
        done.set()
        until_closed(peer)

    with serving(script) as settings, WireConnection.connect(settings) as connection:
        stream = connection.start_replication("s", EndLsn(1), {}, silence_seconds=0.4)
        while not done.is_set():
            stream.read(0.1)
        connection.close()


def test_time_in_which_we_do_not_read_does_not_count_as_silence_of_the_server() -> None:
    def script(peer: socket.socket) -> None:
        greeted(peer)
        read_message(peer)
        peer.sendall(STREAM)
        until_closed(peer)

    pause = threading.Event()
    with serving(script) as settings, WireConnection.connect(settings) as connection:
        stream = connection.start_replication("s", EndLsn(1), {}, silence_seconds=0.4)
        assert stream.read(1.0) is not None
        for _ in range(8):
            pause.wait(0.1)
            stream.tick()
        assert stream.read(0.05) is None
        connection.close()


def test_a_session_is_given_up_if_a_new_connection_gets_no_answer_either() -> None:
    def script(peer: socket.socket) -> None:
        greeted(peer)
        until_closed(peer)

    with serving(script) as settings:
        # The scripted server takes no second connection: the question stays unanswered.
        patient = replace(settings, answer_timeout_seconds=0.4, connect_timeout_seconds=0.5)
        with WireConnection.connect(patient) as connection, pytest.raises(ServerSilent, match="does not answer"):
            connection.query("select 1", waits=True)


def judged(verdicts: list[Verdict]) -> Patience:
    return Patience(SETTINGS, lambda settings, pid: verdicts.pop(0))


def wait_until_left(patience: Patience) -> ConnectionLost:
    pause = threading.Event()
    while True:
        try:
            patience.check()
        except ConnectionLost as error:
            return error
        pause.wait(0.01)


def test_one_that_is_at_work_is_waited_for_and_one_that_is_idle_is_asked_for_twice() -> None:
    verdicts = [Verdict.AT_WORK, Verdict.IDLE, Verdict.AT_WORK, Verdict.IDLE, Verdict.IDLE]
    patience = judged(verdicts)
    assert isinstance(wait_until_left(patience), ServerSilent)
    assert verdicts == []


def test_what_comes_after_the_verdict_counts() -> None:
    patience = judged([Verdict.NO_ANSWER])
    pause = threading.Event()
    while patience._silent is None:
        patience.check()
        pause.wait(0.01)
    patience.heard()
    patience.check()


def test_a_stop_ends_the_wait_for_a_session_that_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.wire.patience.STOP_SECONDS", 0.2)
    stop = threading.Event()
    patience = Patience(replace(SETTINGS, interrupt=stop, answer_timeout_seconds=60.0), None)
    patience.check()
    stop.set()
    error = wait_until_left(patience)
    assert not isinstance(error, ServerSilent)
    assert "start the pipeline again" in error.hint


@pytest.mark.parametrize(
    ("given", "row", "verdict"),
    [
        (9, {"pid": None, "state": None, "wait_event": None, "own": "9"}, Verdict.GONE),
        (9, {"pid": "7", "state": "active", "wait_event": "ClientWrite", "own": "9"}, Verdict.STUCK),
        (9, {"pid": "7", "state": "active", "wait_event": "relation", "own": "9"}, Verdict.AT_WORK),
        (9, {"pid": "7", "state": "idle in transaction", "wait_event": "ClientRead", "own": "9"}, Verdict.IDLE),
        (9, {"pid": "7", "state": "disabled", "wait_event": None, "own": "9"}, Verdict.AT_WORK),
        (8, {"pid": None, "state": None, "wait_event": None, "own": "9"}, Verdict.AT_WORK),
    ],
)
def test_what_a_server_says_of_a_session(given: int, row: dict[str, str | None], verdict: Verdict) -> None:
    assert what_became_of(7, lambda question: (given, row)) is verdict


def test_a_server_that_has_no_connection_left_has_answered() -> None:
    refusal = frame(b"E", b"SFATAL\0VFATAL\0C53300\0Msorry, too many clients already\0\0")

    def script(peer: socket.socket) -> None:
        read_message(peer, startup=True)
        peer.sendall(refusal)

    with serving(script) as settings:

        def ask(question: str) -> tuple[int, dict[str, str | None]]:
            with WireConnection.connect(settings) as connection:
                return connection.backend_pid, connection.query(question)[0]

        assert what_became_of(7, ask) is Verdict.AT_WORK


@pytest.mark.parametrize("ask", [ask_about, session._ask_about], ids=["ours", "psycopg's"])
def test_a_refusal_in_another_language_is_an_answer(ask: Callable[[ConnectSettings, int], Verdict]) -> None:
    """Servers translate FATAL; a healthy session is not left because its server is full."""
    refusal = "S치명적오류\0VFATAL\0C53300\0M최대 동시 접속자 수를 초과했습니다.\0\0".encode()

    def script(peer: socket.socket) -> None:
        read_message(peer, startup=True)
        peer.sendall(frame(b"E", refusal))

    with serving(script) as settings:
        assert ask(settings, 1) is Verdict.AT_WORK


def test_settings_travel_without_the_stop_of_the_run() -> None:
    settings = replace(SETTINGS, interrupt=threading.Event())
    travelled = pickle.loads(pickle.dumps(settings))
    assert travelled == settings
    assert travelled.interrupt is None
    assert travelled.answer_timeout_seconds == 0.2


def test_a_stream_that_gets_no_byte_after_its_start_is_waited_for_longer_the_next_time() -> None:
    limit, options, seconds = SilenceLimit(), StreamOptions("shop", True, 1.0, 60.0), []
    for begins, silent in [(1, True), (1, True), (1, True), (2, True), (2, False), (2, True)]:
        seconds.append(limit.next(EndLsn(begins), options).silence_seconds)
        stream = SlotStream.__new__(SlotStream)
        stream._condition = threading.Condition()
        stream._error = ServerSilent("silent") if silent else None
        limit.begun(stream, EndLsn(begins))
    assert seconds == [60.0, 120.0, 240.0, 60.0, 120.0, 60.0]
