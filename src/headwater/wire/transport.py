"""A connected socket: waiting on it, moving bytes. The one place of `wire` that waits.

A transport belongs to one thread; the only thing another thread may do is `wake()` it. The socket never blocks:
receiving takes what is there, and waiting is a call of its own, so a waiting thread can always be woken.
"""

from __future__ import annotations

import fcntl
import select
import selectors
import socket
import ssl
import termios
import threading
import time
from array import array
from contextlib import suppress

from headwater.errors import ConnectionLost, ProtocolError
from headwater.wire import tls
from headwater.wire.messages import SSL_REQUEST
from headwater.wire.settings import ConnectSettings
from headwater.wire.sockets import not_ready, open_socket, timed_out, unreachable
from headwater.wire.tls_config import TlsMode

_CIPHERTEXT_BYTES = 1 << 20
_NAP_STEP_SECONDS = 0.002
# A Unix socket has no receive buffer: what is unread fills the sender's, which a few hundred changes do.
_LOCAL_NAP_STEP_SECONDS = 0.0005
# A server that takes nothing for this long while we send counts as unreachable.
_SEND_STALL_SECONDS = 60.0


class Transport:
    """A connected socket, in plain or under TLS."""

    def __init__(self, sock: socket.socket, address: str, *, is_local: bool = False) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._address = address
        self._tls: tls.TlsSession | None = None
        self._ciphertext: memoryview | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._wake_lock = threading.Lock()
        self._wake_pending = False
        try:
            self._selector = selectors.DefaultSelector()
        except OSError:
            self._wake_receiver.close()
            self._wake_sender.close()
            raise
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        # Beside the socket pair, because a selector rounds a nap up to whole milliseconds.
        self._alarm = threading.Event()
        self.is_local = is_local
        self.closed = False
        # Until the session is ready: no wait goes past it.
        self.deadline: float | None = None

    @property
    def tls_object(self) -> ssl.SSLObject | None:
        return self._tls.ssl_object if self._tls is not None else None

    def receive_into(self, view: memoryview) -> int:
        """Fill `view` with what is there; 0 when there is nothing now. Raises ConnectionLost at the end."""
        if self._tls is None:
            return self._receive_raw(view)
        total = self._decrypt_into(view)
        while total < len(view):
            assert self._ciphertext is not None
            try:
                count = self._receive_raw(self._ciphertext)
            except ConnectionLost:
                if total:
                    break  # what came before the end is still good; the next call reports the end again
                raise
            if count == 0:
                break
            self._tls.feed(self._ciphertext[:count])
            try:
                decrypted = self._decrypt_into(view[total:])
            except ConnectionLost:
                if total:
                    break
                raise
            if decrypted == 0:
                break  # records without content may come for ever; the caller has a deadline to look at
            total += decrypted
        if answer := self._tls.outgoing():
            self._send_raw(answer)
        return total

    def send(self, data: bytes) -> None:
        """Send all of it, waiting where the server is slow to take it."""
        if self._tls is not None:
            try:
                data = self._tls.encrypt(data)
            except ssl.SSLError as error:
                raise self._lost(f"TLS: {error.reason or error}") from error
        self._send_raw(data)

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait for bytes or a wake-up. False when neither came in time."""
        if self._tls is not None and self._tls.has_buffered:
            return True
        ready = self._selector.select(timeout_seconds)
        if any(key.fileobj is self._wake_receiver for key, _ in ready):
            self._clear_wake()
        return bool(ready)

    def nap_while_filling(self, longest_seconds: float, enough_bytes: int) -> None:
        """Leave the socket alone while the kernel collects, and no longer than it does.

        Nothing more comes when the sender is done, and also when the window is full, which small segments manage at
        64 KiB whatever the buffer's size: either way it is time to read.
        """
        deadline = time.monotonic() + longest_seconds
        step = _LOCAL_NAP_STEP_SECONDS if self.is_local else _NAP_STEP_SECONDS
        before = self._unread()
        while time.monotonic() < deadline:
            if self._alarm.wait(step):
                self._clear_wake()
                return
            unread = self._unread()
            if unread == before or unread >= enough_bytes:
                return
            before = unread

    def wake(self) -> None:
        """End a wait in progress, or the next one. The only method for other threads."""
        with self._wake_lock:
            if not self._wake_pending and not self.closed:
                self._wake_pending = True
                self._alarm.set()
                with suppress(OSError):
                    self._wake_sender.send(b"\0")

    def start_tls(self, settings: ConnectSettings, deadline: float) -> None:
        """Ask for TLS; leaves the connection in plain if the server has none and the mode allows that."""
        context = tls.make_context(settings)
        self._send_raw(SSL_REQUEST)
        # Exactly one byte: anything a stranger slipped in behind the answer must reach TLS, not us.
        answer = bytearray(1)
        while self._receive_raw(memoryview(answer)) == 0:
            self.wait_until(deadline, settings)
        if answer == b"N":
            if settings.tls.sslmode is not TlsMode.PREFER:
                raise tls.refused(settings)
            return
        if answer != b"S":
            raise ProtocolError(
                "answer to the request for TLS is neither yes nor no", detail=f"found {bytes(answer)!r}"
            )
        session = tls.TlsSession(context, settings.host)
        buffer = memoryview(bytearray(_CIPHERTEXT_BYTES))
        try:
            while True:
                done = session.handshake_step()
                if to_send := session.outgoing():
                    self._send_raw(to_send)
                if done:
                    break
                if time.monotonic() >= deadline:
                    raise not_ready(settings)
                while (count := self._receive_raw(buffer)) == 0:
                    self.wait_until(deadline, settings)
                session.feed(buffer[:count])
        except ssl.SSLError as error:
            if alert := session.outgoing():
                with suppress(ConnectionLost):
                    self._send_raw(alert)
            raise tls.handshake_failed(error, settings) from error
        self._tls, self._ciphertext = session, buffer

    def wait_until(self, deadline: float, settings: ConnectSettings) -> None:
        """Wait for bytes while connecting; past the deadline, say which end did not answer."""
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not self.wait(remaining):
            raise timed_out(settings)

    def close(self) -> None:
        with self._wake_lock:
            if self.closed:
                return
            self.closed = True
        self._selector.close()
        for end in (self._socket, self._wake_receiver, self._wake_sender):
            end.close()

    def _decrypt_into(self, view: memoryview) -> int:
        assert self._tls is not None
        try:
            return self._tls.decrypt_into(view)
        except ssl.SSLZeroReturnError as error:
            raise self._lost("the server closed the connection") from error
        except ssl.SSLError as error:
            raise self._lost(f"TLS: {error.reason or error}") from error

    def _unread(self) -> int:
        count = array("i", [0])
        fcntl.ioctl(self._socket, termios.FIONREAD, count)
        return count[0]

    def _receive_raw(self, view: memoryview) -> int:
        try:
            count = self._socket.recv_into(view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        if count == 0:
            raise self._lost("the server closed the connection")
        return count

    def _send_raw(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except (BlockingIOError, InterruptedError):
                self._wait_writable()
            except OSError as error:
                raise self._lost(error.strerror or str(error)) from error

    def _wait_writable(self) -> None:
        longest = _SEND_STALL_SECONDS
        if self.deadline is not None:
            longest = min(longest, max(0.0, self.deadline - time.monotonic()))
        # Not a selector: that is a file of its own, and there may be no more to be had.
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(longest * 1000):
            raise self._lost(f"the server took nothing for {longest:.0f} s")

    def _clear_wake(self) -> None:
        # In one step, so that a wake that comes now is wholly before it or wholly after.
        with self._wake_lock, suppress(BlockingIOError):
            self._wake_pending = False
            self._alarm.clear()
            self._wake_receiver.recv(64)

    def _lost(self, reason: str) -> ConnectionLost:
        return ConnectionLost(
            f"connection to the server at {self._address} was lost",
            detail=reason,
            hint="Look in the server's log at this time for a restart, an out-of-memory kill, pg_terminate_backend or "
            "wal_sender_timeout. Headwater reconnects by itself.",
        )


def open_transport(settings: ConnectSettings, deadline: float) -> Transport:
    """Connect, without TLS yet."""
    sock = open_socket(settings, deadline)
    try:
        transport = Transport(sock, settings.address, is_local=settings.is_unix_socket)
    except OSError as error:
        sock.close()
        raise unreachable(settings, error) from error
    transport.deadline = deadline
    return transport
