"""A host name with several addresses, of which some hang, refuse, or are of the wrong kind, for each way to connect.

The name service is ours, for one name; what is at the addresses is real.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from headwater.errors import AuthenticationError, ConnectError
from headwater.secret import Secret
from headwater.testing.postgres import PostgresServer
from headwater.testing.standby import standby_of
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings, TargetSessionAttrs
from headwater.wire.tls_config import TlsConfig, TlsMode
from tests.integration.connection_kinds import Ask, each_connection_kind

WHERE = "select current_setting('port')"
NAME = "cluster.test"


@dataclass(frozen=True, slots=True)
class Pair:
    primary: PostgresServer
    standby: PostgresServer


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with PostgresServer.start() as primary, standby_of(primary) as standby:
        yield Pair(primary, standby)


@pytest.fixture
def resolving(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of NAME, as the test sets them."""
    addresses: list[str] = []
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        hosts = addresses if host == NAME else [host]
        return [found for one in hosts for found in real(one, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return addresses


@contextmanager
def at_one_port(**targets: int | None) -> Iterator[int]:
    """Listens at 127.0.0.2, 127.0.0.3 ... of one port, in order; each passes connections on to a port, or is silent."""
    stop = threading.Event()
    with ExitStack() as stack:
        first = stack.enter_context(socket.create_server(("127.0.0.2", 0)))
        port: int = first.getsockname()[1]
        listeners = [first] + [
            stack.enter_context(socket.create_server((f"127.0.0.{3 + i}", port))) for i in range(len(targets) - 1)
        ]
        threads = [
            threading.Thread(target=_pass_on, args=(listener, target, stop))
            for listener, target in zip(listeners, targets.values(), strict=True)
            if target is not None
        ]
        for thread in threads:
            thread.start()
        try:
            yield port
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)


def _pass_on(listener: socket.socket, target: int, stop: threading.Event) -> None:
    listener.settimeout(0.05)
    threads: list[threading.Thread] = []
    with ExitStack() as stack:
        while not stop.is_set():
            with suppress(TimeoutError):
                client, _ = listener.accept()
                client.settimeout(None)
                there = socket.create_connection(("127.0.0.1", target))
                for end in (client, there):
                    stack.enter_context(end)
                for source, sink in ((client, there), (there, client)):
                    threads.append(threading.Thread(target=_pump, args=(source, sink)))
                    threads[-1].start()
        for thread in threads:
            thread.join(60)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while said := source.recv(65536):
            sink.sendall(said)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def settings_of(pair: Pair, port: int, **overrides: Any) -> ConnectSettings:
    found = pair.primary.settings(
        host=NAME, tls=TlsConfig(mode=TlsMode.DISABLE), connect_timeout_seconds=2, **overrides
    )
    return replace(found, port=port)


@each_connection_kind
def test_an_address_that_hangs_does_not_take_the_time_of_the_next(ask: Ask, pair: Pair, resolving: list[str]) -> None:
    with at_one_port(silent=None, primary=pair.primary.port) as port:
        resolving[:] = ["127.0.0.2", "127.0.0.3"]
        began = time.monotonic()
        assert ask(settings_of(pair, port), WHERE) == str(pair.primary.port)
        assert 1.5 < time.monotonic() - began < 8


@each_connection_kind
@pytest.mark.parametrize(
    ("wanted", "reached"),
    [
        (TargetSessionAttrs.ANY, "standby"),
        (TargetSessionAttrs.PRIMARY, "primary"),
        (TargetSessionAttrs.READ_WRITE, "primary"),
        (TargetSessionAttrs.STANDBY, "standby"),
        (TargetSessionAttrs.PREFER_STANDBY, "standby"),
    ],
)
def test_each_address_is_asked_whether_it_is_the_wanted_server(
    ask: Ask, pair: Pair, resolving: list[str], wanted: TargetSessionAttrs, reached: str
) -> None:
    with at_one_port(standby=pair.standby.port, primary=pair.primary.port) as port:
        resolving[:] = ["127.0.0.2", "127.0.0.3"]
        settings = settings_of(pair, port, target_session_attrs=wanted)
        assert ask(settings, WHERE) == str(getattr(pair, reached).port)


@each_connection_kind
def test_when_no_address_is_accepted_the_reason_of_each_is_reported(ask: Ask, pair: Pair, resolving: list[str]) -> None:
    with at_one_port(standby=pair.standby.port) as port:
        resolving[:] = ["127.0.0.9", "127.0.0.2"]
        with pytest.raises(ConnectError, match=f"none of the addresses of {NAME}:{port} can be used") as caught:
            ask(settings_of(pair, port, target_session_attrs=TargetSessionAttrs.PRIMARY), WHERE)
    for told in ("127.0.0.9: ", "127.0.0.2: ", "is a standby"):
        assert told in caught.value.detail
    assert caught.value.hint


@each_connection_kind
def test_an_address_that_refuses_us_ends_the_search(ask: Ask, pair: Pair, resolving: list[str]) -> None:
    with at_one_port(standby=pair.standby.port, primary=pair.primary.port) as port:
        resolving[:] = ["127.0.0.2", "127.0.0.3"]
        with pytest.raises(AuthenticationError):
            ask(settings_of(pair, port, password=Secret("wrong")), WHERE)


def test_a_cancel_goes_to_the_address_of_the_session(pair: Pair, resolving: list[str]) -> None:
    with at_one_port(standby=pair.standby.port, primary=pair.primary.port) as port:
        resolving[:] = ["127.0.0.2", "127.0.0.3"]
        settings = settings_of(pair, port, target_session_attrs=TargetSessionAttrs.PRIMARY)
        with WireConnection.connect(settings) as connection:
            timer = threading.Timer(0.5, connection.cancel)
            timer.start()
            with pytest.raises(Exception, match="cancel"):
                connection.query("select pg_sleep(20)")
            timer.join()


@each_connection_kind
def test_localhost_that_leads_elsewhere_is_not_loopback(ask: Ask, pair: Pair) -> None:
    settings = pair.primary.settings(host="localhost")
    assert settings.knows_the_server
    assert replace(settings, hostaddr="127.0.0.1").knows_the_server
    assert not replace(settings, hostaddr="10.0.0.1").knows_the_server
    assert ask(settings, WHERE) == str(pair.primary.port)
