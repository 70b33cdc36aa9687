"""Whole sessions against a scripted server: the bytes of a session, cut anywhere, give an error and never a hang."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from scramp import ScramMechanism

from headwater.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLost,
    HeadwaterError,
    ProtocolError,
    ServerError,
    TlsError,
)
from headwater.lsn import EndLsn
from headwater.secret import Secret
from headwater.wire import messages
from headwater.wire.connection import WireConnection
from headwater.wire.messages import frame
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls_config import TlsConfig, TlsMode

Script = Callable[[socket.socket], None]

GREETING = (
    frame(b"R", struct.pack("!i", 0))
    + frame(b"S", b"server_version\x0013.4\0")
    + frame(b"K", struct.pack("!ii", 77, 4711))
    + frame(b"Z", b"I")
)
ROWS = (
    frame(b"T", struct.pack("!h", 2) + b"a\0" + bytes(18) + b"b\0" + bytes(18))
    + frame(b"N", b"SWARNING\0VWARNING\0C01000\0Mmind\0\0")
    + frame(b"D", struct.pack("!hi", 2, 1) + b"1" + struct.pack("!i", -1))
    + frame(b"C", b"SELECT 1\0")
    + frame(b"Z", b"I")
)
COPY = (
    frame(b"H", struct.pack("!bh", 1, 0))
    + frame(b"d", b"first")
    + frame(b"S", b"TimeZone\0UTC\0")
    + frame(b"d", b"second")
    + frame(b"c")
    + frame(b"C", b"COPY 2\0")
    + frame(b"Z", b"I")
)
FAILURE = frame(b"E", b"SERROR\0VERROR\0C42P01\0Mno such table\0\0") + frame(b"Z", b"I")


def xlog(wal_end: int, payload: bytes = b"") -> bytes:
    return frame(b"d", b"w" + struct.pack("!QQq", wal_end, wal_end, 0) + payload)


def keepalive(wal_end: int, asks: bool = False) -> bytes:
    return frame(b"d", b"k" + struct.pack("!QqB", wal_end, 0, asks))


STREAM = frame(b"W", struct.pack("!bh", 0, 0)) + xlog(100, b"B...") + keepalive(120, True) + xlog(130, b"C")


@contextmanager
def serving(script: Script) -> Iterator[ConnectSettings]:
    """A server for one connection, in a thread, that does what the script says and then hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(60)
                script(peer)
                # In order: a close with bytes unread would reset the connection and take the last ones with it. Unless the client
                # has hung up itself.
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(4096):
                        pass
        except (ConnectionError, BrokenPipeError):
            pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, name="scripted-server")
    thread.start()
    port = listener.getsockname()[1]
    try:
        yield ConnectSettings(
            "127.0.0.1",
            port,
            "shop",
            "reader",
            Secret("hunter2"),
            TlsConfig(mode=TlsMode.DISABLE),
            connect_timeout_seconds=60,
        )
    finally:
        thread.join(60)
        listener.close()
        assert not thread.is_alive()
        assert not failures


def read_message(peer: socket.socket, *, startup: bool = False) -> bytes:
    header = _exactly(peer, 4 if startup else 5)
    return _exactly(peer, int.from_bytes(header[-4:], "big") - 4)


def _exactly(peer: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        piece = peer.recv(count - len(got))
        if not piece:
            raise ConnectionError
        got += piece
    return got


def greeted(peer: socket.socket) -> None:
    read_message(peer, startup=True)
    peer.sendall(GREETING)


def answering(answer: bytes) -> Script:
    def script(peer: socket.socket) -> None:
        greeted(peer)
        read_message(peer)
        peer.sendall(answer)

    return script


def use_query(connection: WireConnection) -> None:
    connection.query("select a, b")


def use_copy(connection: WireConnection) -> None:
    list(connection.copy_out("copy t to stdout"))


def use_stream(connection: WireConnection) -> None:
    stream = connection.start_replication("s", EndLsn(0), {})
    for _ in range(10):
        stream.read(5)


@pytest.mark.parametrize(
    ("answer", "use"), [(ROWS, use_query), (COPY, use_copy), (FAILURE, use_query), (FAILURE, use_copy)]
)
def test_an_answer_cut_at_any_byte_is_a_lost_connection(answer: bytes, use: Callable[[WireConnection], None]) -> None:
    for length in range(len(answer)):
        with serving(answering(answer[:length])) as settings, WireConnection.connect(settings) as connection:
            with pytest.raises((ProtocolError, ConnectionLost, *_said(answer, length))):
                use(connection)
            assert connection.closed


def _said(answer: bytes, length: int) -> tuple[type[Exception], ...]:
    """A server that has said in full what is wrong, and only then hung up, is believed."""
    return (ServerError,) if answer is FAILURE and length >= len(FAILURE) - 6 else ()


def test_a_stream_cut_at_any_byte_is_a_lost_connection() -> None:
    for length in range(len(STREAM)):
        with (
            serving(answering(STREAM[:length])) as settings,
            WireConnection.connect(settings) as connection,
            pytest.raises((ProtocolError, ConnectionLost)),
        ):
            use_stream(connection)


def test_a_greeting_cut_at_any_byte_is_a_lost_connection() -> None:
    for length in range(len(GREETING)):

        def script(peer: socket.socket, length: int = length) -> None:
            read_message(peer, startup=True)
            peer.sendall(GREETING[:length])

        with serving(script) as settings, pytest.raises((ProtocolError, ConnectionLost)):
            WireConnection.connect(settings)


@pytest.mark.parametrize("answer", [ROWS, COPY, STREAM], ids=["rows", "copy", "stream"])
def test_a_flipped_byte_never_hangs_and_never_raises_anything_else(answer: bytes) -> None:
    use = {id(ROWS): use_query, id(COPY): use_copy, id(STREAM): use_stream}[id(answer)]
    for position in range(len(answer)):
        damaged = bytearray(answer)
        damaged[position] ^= 0xFF
        with (
            serving(answering(bytes(damaged))) as settings,
            WireConnection.connect(settings) as connection,
            suppress(HeadwaterError),
        ):
            use(connection)


def test_rows_come_as_text_and_the_session_continues() -> None:
    def script(peer: socket.socket) -> None:
        greeted(peer)
        for answer in (ROWS, FAILURE, ROWS):
            read_message(peer)
            peer.sendall(answer)

    with serving(script) as settings, WireConnection.connect(settings) as connection:
        assert connection.server_version == 130004
        assert connection.backend_pid == 77
        assert connection.query("select a, b") == [{"a": "1", "b": None}]
        with pytest.raises(ServerError) as caught:
            connection.query("select")
        assert caught.value.sqlstate == "42P01"
        assert connection.query("select a, b") == [{"a": "1", "b": None}]


def test_copy_yields_only_copy_data_and_frees_the_connection() -> None:
    def script(peer: socket.socket) -> None:
        greeted(peer)
        for answer in (COPY, ROWS):
            read_message(peer)
            peer.sendall(answer)

    with serving(script) as settings, WireConnection.connect(settings) as connection:
        chunks = connection.copy_out("copy t to stdout")
        with pytest.raises(RuntimeError, match="busy"):
            connection.query("select 1")
        assert b"".join(chunk.data.tobytes() for chunk in chunks) == frame(b"d", b"first") + frame(b"d", b"second")
        assert connection.parameters["TimeZone"] == "UTC"
        assert connection.query("select a, b")


def test_an_abandoned_copy_closes_the_connection() -> None:
    with serving(answering(COPY)) as settings, WireConnection.connect(settings) as connection:
        chunks = connection.copy_out("copy t to stdout")
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
        assert connection.closed


def statuses(peer: socket.socket, count: int) -> list[tuple[int, int, int, int]]:
    found = []
    for _ in range(count):
        body = read_message(peer)
        _, written, flushed, applied, _, asks = struct.unpack("!cQQQqB", body)
        found.append((written, flushed, applied, asks))
    return found


def test_a_keepalive_that_asks_is_answered_at_once_and_without_an_unconfirmed_flush() -> None:
    seen: list[tuple[int, int, int, int]] = []

    def script(peer: socket.socket) -> None:
        greeted(peer)
        read_message(peer)
        peer.sendall(STREAM)
        seen.extend(statuses(peer, 1))

    with serving(script) as settings, WireConnection.connect(settings) as connection:
        stream = connection.start_replication("s", EndLsn(0), {}, status_interval_seconds=60)
        received = b""
        while (piece := stream.read(0.2)) is not None and stream.last_received < EndLsn(130):
            received += piece.data.tobytes()
    assert seen[0][0] in (120, 130)
    assert seen[0][1:] == (0, 0, 0)


def test_confirm_from_another_thread_is_sent_while_the_reader_waits_and_never_moves_back() -> None:
    seen: list[tuple[int, int, int, int]] = []
    sent = threading.Event()

    def script(peer: socket.socket) -> None:
        greeted(peer)
        read_message(peer)
        peer.sendall(frame(b"W", struct.pack("!bh", 0, 0)) + xlog(100))
        seen.extend(statuses(peer, 1))
        sent.set()
        for _ in range(2):
            seen.extend(statuses(peer, 1))

    with serving(script) as settings, WireConnection.connect(settings) as connection:
        stream = connection.start_replication("s", EndLsn(40), {}, status_interval_seconds=60)
        assert stream.read(5) is not None

        def confirm() -> None:
            stream.confirm(EndLsn(30))  # before the start
            stream.confirm(EndLsn(90))
            assert sent.wait(60)
            stream.confirm(EndLsn(80))  # back
            stream.request_reply()

        other = threading.Thread(target=confirm)
        began = time.monotonic()
        other.start()
        while len(seen) < 2:
            # One wait would do, were the reply not asked for from the other thread: neither call may end it.
            threading.Timer(0.3, stream.wake).start()
            assert stream.read(30) is None
        assert time.monotonic() - began < 5
        other.join()
        stream.confirm(EndLsn(500))
        stream.tick()
    assert seen == [(100, 90, 90, 0), (100, 90, 90, 1), (500, 500, 500, 0)]


@pytest.mark.invariant(8)
def test_status_goes_out_on_time_from_tick_alone_and_from_a_long_read() -> None:
    arrivals: list[float] = []

    def script(peer: socket.socket) -> None:
        greeted(peer)
        read_message(peer)
        peer.sendall(frame(b"W", struct.pack("!bh", 0, 0)))
        for _ in range(4):
            statuses(peer, 1)
            arrivals.append(time.monotonic())

    with serving(script) as settings, WireConnection.connect(settings) as connection:
        stream = connection.start_replication("s", EndLsn(0), {}, status_interval_seconds=0.1)
        began = time.monotonic()
        assert stream.read(0.25) is None
        while len(arrivals) < 4:
            stream.tick()
            threading.Event().wait(0.01)
    gaps = [later - earlier for earlier, later in zip([began, *arrivals], arrivals, strict=False)]
    assert all(0.05 < gap < 2 for gap in gaps)


def test_wake_ends_the_read_in_progress_or_the_next() -> None:
    done = threading.Event()

    def script(peer: socket.socket) -> None:
        greeted(peer)
        read_message(peer)
        peer.sendall(frame(b"W", struct.pack("!bh", 0, 0)))
        done.wait(10)

    with serving(script) as settings, WireConnection.connect(settings) as connection:
        stream = connection.start_replication("s", EndLsn(0), {})
        began = time.monotonic()
        stream.wake()
        assert stream.read(30) is None
        threading.Timer(0.1, stream.wake).start()
        assert stream.read(30) is None
        assert time.monotonic() - began < 5
        assert stream.read(0.01) is None
        done.set()


def test_what_came_before_the_break_is_delivered_first() -> None:
    with serving(answering(STREAM)) as settings, WireConnection.connect(settings) as connection:
        stream = connection.start_replication("s", EndLsn(0), {})
        received: list[bytes] = []

        def read_on() -> None:
            while True:
                if (piece := stream.read(5)) is not None:
                    received.append(piece.data.tobytes())

        with pytest.raises(ConnectionLost):
            read_on()
    assert b"".join(received) == STREAM[8:]


def test_a_server_that_has_no_tls_is_refused_where_tls_is_required() -> None:
    def script(peer: socket.socket) -> None:
        _exactly(peer, 8)
        peer.sendall(b"N")

    with serving(script) as settings, pytest.raises(TlsError, match="does not offer TLS"):
        WireConnection.connect(replace(settings, tls=TlsConfig(mode=TlsMode.REQUIRE)))


def test_prefer_continues_without_tls_where_there_is_none() -> None:
    def script(peer: socket.socket) -> None:
        _exactly(peer, 8)
        peer.sendall(b"N")
        greeted(peer)

    with serving(script) as settings:
        WireConnection.connect(replace(settings, tls=TlsConfig(mode=TlsMode.PREFER))).close()


def test_a_silent_server_is_given_up_after_the_timeout() -> None:
    silence = threading.Event()

    def script(peer: socket.socket) -> None:
        silence.wait(10)

    with serving(script) as settings:
        with pytest.raises(ConnectError, match="no answer"):
            WireConnection.connect(replace(settings, connect_timeout_seconds=0.2))
        silence.set()


def sasl(code: int, data: bytes) -> bytes:
    return frame(b"R", struct.pack("!i", code) + data)


def scram_script(password: str, *, proves: bool = True) -> Script:
    def script(peer: socket.socket) -> None:
        mechanism = ScramMechanism("SCRAM-SHA-256")
        stored = mechanism.make_auth_info(password)
        server = mechanism.make_server(lambda _: stored)
        read_message(peer, startup=True)
        peer.sendall(sasl(10, b"SCRAM-SHA-256\0\0"))
        first = read_message(peer)
        server.set_client_first(first[len(b"SCRAM-SHA-256\0") + 4 :].decode())
        peer.sendall(sasl(11, server.get_server_first().encode()))
        server.set_client_final(read_message(peer).decode())
        if proves:
            peer.sendall(sasl(12, server.get_server_final().encode()))
        peer.sendall(GREETING)

    return script


def test_scram_lets_us_in() -> None:
    with serving(scram_script("hunter2")) as settings:
        WireConnection.connect(settings).close()


def test_a_server_that_does_not_prove_itself_is_refused() -> None:
    with serving(scram_script("hunter2", proves=False)) as settings:
        with pytest.raises(AuthenticationError, match="could not be authenticated") as caught:
            WireConnection.connect(settings)
        assert "hunter2" not in str(caught.value)


def test_a_stop_ends_the_stream_and_frees_the_connection() -> None:
    def script(peer: socket.socket) -> None:
        greeted(peer)
        read_message(peer)
        peer.sendall(STREAM)
        while read_message(peer):  # statuses, then CopyDone, which is empty
            pass
        peer.sendall(xlog(200) + frame(b"c") + frame(b"C", b"COPY 0\0") + frame(b"Z", b"I"))
        read_message(peer)
        peer.sendall(ROWS)

    with serving(script) as settings, WireConnection.connect(settings) as connection:
        stream = connection.start_replication("s", EndLsn(0), {})
        assert stream.read(5) is not None
        stream.stop()
        with pytest.raises(ConnectionLost, match="has ended"):
            stream.read(0)
        assert connection.query("select a, b") == [{"a": "1", "b": None}]


def test_a_refused_port_is_a_connect_error_that_may_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectError, match=f"no server at 127.0.0.1:{port}") as caught:
        WireConnection.connect(ConnectSettings("127.0.0.1", port, "shop", "reader"))
    assert "listen_addresses" in caught.value.hint


def test_text_with_a_zero_byte_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ProtocolError, match="zero byte"):
        messages.query("select '\0'")
