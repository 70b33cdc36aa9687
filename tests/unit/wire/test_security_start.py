"""A server that means harm, or is none, while a session starts: it gets neither our time nor our memory."""

from __future__ import annotations

import gc
import socket
import ssl
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import trustme

from headwater.errors import ConnectError, ConnectionLost, HeadwaterError, ProtocolError
from headwater.source.session import connect
from headwater.wire.connection import WireConnection
from headwater.wire.messages import frame
from headwater.wire.settings import ConnectSettings, TargetSessionAttrs
from headwater.wire.tls_config import TlsConfig, TlsMode
from tests.unit.wire.test_connection_session import Script, answering, greeted, read_message, serving

LET_IN = frame(b"R", struct.pack("!i", 0))
NOTICE = frame(b"N", b"SNOTICE\0VNOTICE\0C00000\0Mhold the line\0\0")


def opened_and_closed(settings: ConnectSettings) -> None:
    WireConnection.connect(settings).close()


def dripping(before: bytes, message: Callable[[int], bytes], seconds: float = 6.0) -> Script:
    """Says something again and again: the socket is never silent for long, and not much is sent in all."""

    def script(peer: socket.socket) -> None:
        read_message(peer, startup=True)
        peer.sendall(before)
        until = time.monotonic() + seconds
        count = 0
        while time.monotonic() < until:
            peer.sendall(message(count))
            count += 1
            time.sleep(0.005)

    return script


def flooding(before: bytes, message: Callable[[int], bytes]) -> Script:
    def script(peer: socket.socket) -> None:
        read_message(peer, startup=True)
        peer.sendall(before)
        for number in range(0, 10_000_000, 1000):
            peer.sendall(b"".join(message(number + i) for i in range(1000)))

    return script


def parameter(number: int) -> bytes:
    return frame(b"S", f"setting_{number}\0on\0".encode())


@pytest.mark.parametrize(
    "use", [opened_and_closed, lambda settings: connect(settings).close()], ids=["wire", "psycopg"]
)
@pytest.mark.parametrize("message", [lambda _: NOTICE, lambda _: parameter(1)], ids=["notices", "parameters"])
def test_a_server_that_keeps_talking_is_given_up_after_the_timeout(
    use: Callable[[ConnectSettings], None], message: Callable[[int], bytes]
) -> None:
    with serving(dripping(LET_IN, message)) as settings:
        began = time.monotonic()
        with pytest.raises(ConnectError) as caught:
            use(replace(settings, connect_timeout_seconds=2))
        assert time.monotonic() - began < 4
        assert caught.value.detail
        assert caught.value.hint
        # psycopg's attempt refers to itself, and its socket is closed with it.
        gc.collect()


@pytest.mark.parametrize("message", [lambda _: NOTICE, parameter], ids=["notices", "parameters"])
def test_a_flood_before_the_session_is_ready_takes_no_memory(message: Callable[[int], bytes]) -> None:
    tracemalloc.start()
    try:
        with serving(flooding(LET_IN, message)) as settings, pytest.raises(ProtocolError) as caught:
            opened_and_closed(replace(settings, connect_timeout_seconds=20))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.hint


@pytest.mark.parametrize(("kind", "longest"), [(b"E", 30_000), (b"R", 2000), (b"v", 2000)])
def test_a_message_that_is_too_long_before_the_login_is_refused_by_its_header(kind: bytes, longest: int) -> None:
    for length in (longest + 1, 1 << 30):

        def script(peer: socket.socket, length: int = length) -> None:
            read_message(peer, startup=True)
            peer.sendall(kind + struct.pack("!i", length))
            # Nothing more: who waits for the rest waits for the timeout.
            while peer.recv(4096):
                pass

        with serving(script) as settings:
            began = time.monotonic()
            with pytest.raises(ProtocolError, match="too long") as caught:
                opened_and_closed(settings)
            assert time.monotonic() - began < 3
        assert str(length) in caught.value.detail


@pytest.mark.parametrize("kind", [b"N", b"S", b"K", b"Z", b"D", b"d"])
def test_nothing_but_the_login_is_taken_before_it_is_over(kind: bytes) -> None:
    def script(peer: socket.socket) -> None:
        read_message(peer, startup=True)
        peer.sendall(kind + struct.pack("!i", 1 << 20))
        while peer.recv(4096):
            pass

    with serving(script) as settings, pytest.raises(ProtocolError, match="unexpected message"):
        opened_and_closed(settings)


def test_an_error_that_is_longer_than_most_is_still_reported() -> None:
    said = frame(b"E", b"SFATAL\0VFATAL\0C28000\0M" + b"x" * 29_000 + b"\0\0")

    def script(peer: socket.socket) -> None:
        read_message(peer, startup=True)
        peer.sendall(said)

    with serving(script) as settings, pytest.raises(HeadwaterError, match=r"pg_hba|authenticated|xxx"):
        opened_and_closed(settings)


def test_a_second_login_after_the_first_is_refused() -> None:
    def script(peer: socket.socket) -> None:
        read_message(peer, startup=True)
        peer.sendall(LET_IN + frame(b"R", struct.pack("!i", 3)))
        assert peer.recv(4096) == b""  # and no password

    with serving(script) as settings, pytest.raises(ProtocolError, match="unexpected message"):
        opened_and_closed(settings)


@pytest.mark.parametrize(
    "use", [opened_and_closed, lambda settings: connect(settings).close()], ids=["wire", "psycopg"]
)
def test_a_server_that_stops_answering_after_the_login_is_given_up_too(use: Callable[[ConnectSettings], None]) -> None:
    silence = threading.Event()

    def script(peer: socket.socket) -> None:
        greeted(peer)
        silence.wait(20)

    with serving(script) as settings:
        began = time.monotonic()
        try:
            with pytest.raises(ConnectError):
                use(replace(settings, connect_timeout_seconds=2, target_session_attrs=TargetSessionAttrs.PRIMARY))
            assert time.monotonic() - began < 6
        finally:
            silence.set()


def test_settings_that_are_reported_during_a_session_are_bounded_too() -> None:
    many = b"".join(parameter(number) for number in range(10_000))
    with serving(answering(many)) as settings, WireConnection.connect(settings) as connection:
        with pytest.raises(ProtocolError, match="more settings") as caught:
            connection.query("select 1")
        assert connection.closed
        assert len(connection.parameters) < 1000
    assert caught.value.hint


def test_the_same_setting_may_be_reported_any_number_of_times() -> None:
    again = b"".join(frame(b"S", f"TimeZone\0zone {number}\0".encode()) for number in range(5000))
    done = frame(b"C", b"SELECT 0\0") + frame(b"Z", b"I")
    with serving(answering(again + done)) as settings, WireConnection.connect(settings) as connection:
        assert connection.query("select 1") == []
        assert connection.parameters["TimeZone"] == "zone 4999"


def test_a_session_that_is_ready_has_no_deadline() -> None:
    def script(peer: socket.socket) -> None:
        greeted(peer)
        read_message(peer)
        time.sleep(1)
        peer.sendall(frame(b"C", b"SELECT 0\0") + frame(b"Z", b"I"))

    with (
        serving(script) as settings,
        WireConnection.connect(replace(settings, connect_timeout_seconds=0.5)) as connection,
    ):
        assert connection.query("select pg_sleep(1)") == []


def test_tls_that_never_comes_to_an_end_is_given_up_after_the_timeout() -> None:
    """Handshake bytes one at a time: each wait is short, and the whole would be long."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)

    def script(peer: socket.socket) -> None:
        assert len(peer.recv(8)) == 8
        peer.sendall(b"S")
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=True)
        incoming.write(peer.recv(65536))
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        for byte in outgoing.read():
            peer.sendall(bytes([byte]))
            time.sleep(0.01)

    with serving(script) as settings:
        began = time.monotonic()
        with pytest.raises((ConnectError, ConnectionLost)):
            opened_and_closed(replace(settings, tls=TlsConfig(mode=TlsMode.REQUIRE), connect_timeout_seconds=1))
        assert time.monotonic() - began < 3
