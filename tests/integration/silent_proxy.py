"""A proxy before a server, which on request keeps every socket open and forwards nothing: not a byte, not an end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from headwater.wire.settings import ConnectSettings


class SilentProxy:
    """Forwards until it is told otherwise, from any thread."""

    def __init__(self, target: ConnectSettings) -> None:
        self._target = (target.host, target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._changed = threading.Condition()
        self._held: set[int] = set()
        self._holds_new = False
        self._closed = False
        self._marker = b""
        self._passes_marker = True
        self._answer_bytes = 0
        self._counted: dict[int, int] = {}
        self._ends: list[socket.socket] = []
        self._count = 0
        self.silenced = threading.Event()
        """Set once it has fallen silent by itself (`silence_at`)."""
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def before(self, settings: ConnectSettings) -> ConnectSettings:
        return replace(settings, host="127.0.0.1", port=self.port, hostaddr=None)

    def silence(self, *, new_too: bool = True) -> None:
        """From now on nothing is forwarded on the connections that there are, nor, with `new_too`, on others."""
        with self._changed:
            self._held = set(range(self._count))
            self._holds_new = new_too

    def silence_at(self, marker: bytes, *, passes: bool = True, answer_bytes: int = 0) -> None:
        """When a client sends this; the message itself is forwarded or not, and so many bytes of what is answered."""
        with self._changed:
            self._marker, self._passes_marker, self._answer_bytes = marker, passes, answer_bytes

    def resume(self) -> None:
        with self._changed:
            self._held.clear()
            self._holds_new = False
            self._marker = b""
            self._counted.clear()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                number, self._count = self._count, self._count + 1
                if self._holds_new:
                    self._held.add(number)
            threading.Thread(target=self._serve, args=(number, client), name="proxy", daemon=True).start()

    def _serve(self, number: int, client: socket.socket) -> None:
        with client:
            # Only a proxy that forwards goes to its server.
            if not self._may_pass(number):
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                return
            with server:
                self._ends += [client, server]
                back = threading.Thread(target=self._forward, args=(number, server, client, False), daemon=True)
                back.start()
                self._forward(number, client, server, True)
                back.join()

    def _forward(self, number: int, source: socket.socket, sink: socket.socket, from_client: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if from_client and self._marker and self._marker in data:
                    passes = self._passes_marker
                    # Before it is sent: the answer must not be faster.
                    if self._answer_bytes:
                        self._counted[number] = self._answer_bytes
                    if passes:
                        sink.sendall(data)
                    self._marker = b""
                    if not self._answer_bytes:
                        self._fall_silent()
                    if passes:
                        continue
                if not from_client and number in self._counted:
                    self._counted[number] -= len(data)
                    if self._counted[number] <= 0:
                        del self._counted[number]
                        self._fall_silent()
                if not self._may_pass(number):
                    return
                sink.sendall(data)
        if self._may_pass(number):
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

    def _fall_silent(self) -> None:
        self.silence()
        self.silenced.set()

    def _may_pass(self, number: int) -> bool:
        """Waits while the connection is held. False once the proxy is closed."""
        with self._changed:
            self._changed.wait_for(lambda: number not in self._held or self._closed)
            return not self._closed


@contextmanager
def silent_proxy(target: ConnectSettings) -> Iterator[SilentProxy]:
    proxy = SilentProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
