"""A relay that terminates TLS: to the client it shows a certificate of its own, to the server it is a client."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import trustme

from headwater.wire.messages import SSL_REQUEST


@contextmanager
def tls_relay(
    server_port: int,
    to_client: ssl.SSLContext | None = None,
    change: Callable[[bytes], bytes] = lambda answer: answer,
) -> Iterator[int]:
    """Its port, for one connection. `change` is applied to what the server answers."""
    if to_client is None:
        to_client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("localhost").configure_cert(to_client)
    to_server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    to_server.check_hostname, to_server.verify_mode = False, ssl.CERT_NONE

    def relay() -> None:
        with suppress(OSError), ExitStack() as stack:
            client = stack.enter_context(listener.accept()[0])
            assert client.recv(8) == SSL_REQUEST
            client.sendall(b"S")
            client = stack.enter_context(to_client.wrap_socket(client, server_side=True))
            server = stack.enter_context(socket.create_connection(("127.0.0.1", server_port)))
            server.sendall(SSL_REQUEST)
            assert server.recv(1) == b"S"
            server = stack.enter_context(to_server.wrap_socket(server))
            # A conversation in turns: each side speaks and then waits for the other.
            while said := client.recv(65536):
                server.sendall(said)
                client.sendall(change(server.recv(65536)))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=relay)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(60)
        assert not thread.is_alive()
