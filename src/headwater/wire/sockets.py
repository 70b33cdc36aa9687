"""Opens a socket to one server: its addresses, its options, and the errors if it cannot be opened."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import replace

from headwater.errors import ConnectError, Retry
from headwater.limits import limit_reached, no_more_files
from headwater.wire.settings import ConnectSettings, TcpKeepaliveConfig

# A walsender sends each change with a system call of its own; the kernel merges them only as far as this buffer goes.
RECEIVE_BUFFER_BYTES = 8 << 20


def each_address(settings: ConnectSettings) -> tuple[ConnectSettings, ...]:
    """The same settings for each address of the host, in the order of the name service.

    A name that cannot be looked up now stays as it is: to connect to it then raises the error.
    """
    if settings.is_unix_socket or settings.hostaddr is not None:
        return (settings,)
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return (settings,)
    addresses = dict.fromkeys(str(address[0]) for *_, address in found)
    return tuple(replace(settings, hostaddr=address) for address in addresses) or (settings,)


def open_socket(settings: ConnectSettings, deadline: float) -> socket.socket:
    """Connected, or ConnectError."""
    try:
        return _open_unix(settings, deadline) if settings.is_unix_socket else _open_tcp(settings, deadline)
    except TimeoutError as error:
        raise timed_out(settings) from error
    except OSError as error:
        raise unreachable(settings, error) from error


def _open_unix(settings: ConnectSettings, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return _connect(sock, settings.socket_path, deadline)


def _open_tcp(settings: ConnectSettings, deadline: float) -> socket.socket:
    failure: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        settings.hostaddr or settings.host, settings.port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        # Before connecting: the window scale is settled in the handshake and cannot grow with the buffer later.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _set_keepalive(sock, settings.keepalive)
        try:
            return _connect(sock, address, deadline)
        except OSError as error:
            failure = error
    raise failure if failure is not None else OSError("the name has no address")


def _connect(sock: socket.socket, address: object, deadline: float) -> socket.socket:
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(address)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock


def _set_keepalive(sock: socket.socket, keepalive: TcpKeepaliveConfig) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    patience = keepalive.idle_seconds + keepalive.interval_seconds * keepalive.retries
    # Not every system has all of them. TCP_USER_TIMEOUT covers what keepalive does not: a peer that died with data of
    # ours unacknowledged.
    for name, value in (
        ("TCP_KEEPIDLE", keepalive.idle_seconds),
        ("TCP_KEEPINTVL", keepalive.interval_seconds),
        ("TCP_KEEPCNT", keepalive.retries),
        ("TCP_USER_TIMEOUT", patience * 1000),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def timed_out(settings: ConnectSettings) -> ConnectError:
    return ConnectError(
        f"no answer from {settings.address}",
        detail=f"nothing came within {settings.connect_timeout_seconds:g} s",
        hint="Check host and port, and whether a firewall drops packets. A new connection has 10 s, or answer_timeout_ms if that "
        "is less.",
    )


def not_ready(settings: ConnectSettings) -> ConnectError:
    return ConnectError(
        f"session at {settings.address} was not ready in time",
        detail=f"the server answered, but {settings.connect_timeout_seconds:g} s after the start of the connection it did not "
        "accept commands yet",
        hint="Check that host and port are those of a Postgres server, and how busy that server is.",
    )


def unreachable(settings: ConnectSettings, error: OSError) -> ConnectError:
    doing = f"connecting to {settings.address}"
    # A name service that cannot open its files says that there is no such name.
    limit = no_more_files(doing) if isinstance(error, socket.gaierror) else limit_reached(error, doing)
    if limit is not None:
        return limit
    reason = error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return ConnectError(
            f'host "{settings.host}" could not be found',
            detail=reason,
            hint="Check the spelling of host, and the name service of this machine.",
            # A name service that is down for a moment says "try again" (EAI_AGAIN); a wrong name stays wrong.
            retry=Retry.TIMED if error.errno == socket.EAI_AGAIN else Retry.NEVER,
        )
    if settings.is_unix_socket:
        return ConnectError(
            f"no server at {settings.address}",
            detail=reason,
            hint="Check that the server runs, that host is one of its unix_socket_directories, and the port.",
        )
    return ConnectError(
        f"no server at {settings.address}",
        detail=reason,
        hint="Check that the server runs and accepts TCP (listen_addresses, port), and any firewall between.",
    )
