"""Makes the honest part of the corpus: what a real server sends, byte by byte. `python -m tests.fuzz.decoders capture`."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from headwater.lsn import ZERO
from headwater.source.session import Connection
from headwater.testing.postgres import PostgresServer
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls_config import TlsConfig, TlsMode
from tests.fuzz.decoders.targets import EVERY_TYPE

_OPTIONS = {"proto_version": "2", "publication_names": "p", "binary": "true", "messages": "true"}
_SERVER = {
    # Every change of a transaction in progress is sent at once, so that a few rows come in blocks.
    "debug_logical_replication_streaming": "immediate",
}
_HBA = ["local all all trust", "host all all 127.0.0.1/32 trust", "host replication all 127.0.0.1/32 trust"]
_VALUES = {
    "bool": "true", "bytea": r"'\x00ff41'", "char": "'x'", "name": "'a name'", "int8": "-9223372036854775808",
    "int2": "-1", "int4": "2147483647", "text": "'täxt \"quoted\", with comma'", "oid": "4294967295", "json": "'{\"a\": 1}'",
    "float4": "'-Infinity'", "float8": "1e-300", "bpchar": "'c'", "varchar": "''", "date": "'0044-03-15 BC'",
    "timestamp": "'2026-01-01 12:34:56.789'", "timestamptz": "'1999-12-31 23:59:59+14'",
    "numeric": "-12345678901234567890.0123456789",
    "uuid": "'00112233-4455-6677-8899-aabbccddeeff'", "jsonb": "'[null, {\"k\": \"v\"}]'", "point": "'(1,2)'",
}  # fmt: skip
_BINARY = [column for column in EVERY_TYPE if column.type.binary]


def capture(directory: Path) -> None:
    with PostgresServer.start(settings=_SERVER, hba=_HBA) as server:
        name = server.create_database()
        settings = server.settings(name)
        with server.connect(name) as connection:
            _fill(connection)
            _write(directory / "copy_binary" / "every_type.bin", _copied(settings))
            _change(connection)
        for slot in ("plain", "streamed"):
            _write(directory / "pgoutput" / f"{slot}.bin", _followed(settings, slot))
        _write(directory / "session" / "whole.bin", _session(server, name))
    for number, column in enumerate(EVERY_TYPE):
        _write(directory / "values" / f"{column.name}.bin", bytes([number]) + _value_bytes(directory, number))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _typed(type_name: str, name: str) -> str:
    return {"c_10_2": "numeric(10,2)", "c_38_37": "numeric(38,37)", "c_decimals": "numeric(20,4)[]"}.get(
        name,
        f'"char"{"[]" if type_name.endswith("[]") else ""}' if type_name.removesuffix("[]") == "char" else type_name,
    )


def _literal(name: str, type_name: str) -> str:
    if name in ("c_10_2", "c_38_37"):
        return "1.25"
    if name == "c_decimals":
        return "ARRAY[1.25, NULL, -3]"
    scalar = _VALUES[type_name.removesuffix("[]")]
    return f"ARRAY[{scalar}, NULL, {scalar}]::{_typed(type_name, name)}" if type_name.endswith("[]") else scalar


def _fill(connection: Connection) -> None:
    columns = ", ".join(f"{c.name} {_typed(c.type.name, c.name)}" for c in _BINARY)
    connection.execute(f"CREATE TABLE t ({columns})")
    connection.execute(f"INSERT INTO t VALUES ({_row()})")
    connection.execute("INSERT INTO t DEFAULT VALUES")
    connection.execute("CREATE TABLE k (id int PRIMARY KEY, v text, n numeric)")
    connection.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    connection.execute("CREATE PUBLICATION p FOR TABLE t, k")


def _row() -> str:
    return ", ".join(_literal(c.name, c.type.name) for c in _BINARY)


def _change(connection: Connection) -> None:
    connection.execute("SELECT pg_create_logical_replication_slot('plain', 'pgoutput')")
    connection.execute(f"INSERT INTO t VALUES ({_row()})")
    connection.execute("DELETE FROM t WHERE c16 IS NULL")
    connection.execute("INSERT INTO k VALUES (1, 'one', 1), (2, 'two', 'NaN')")
    connection.execute("UPDATE k SET id = 3, v = 'three' WHERE id = 1")
    connection.execute("DELETE FROM k WHERE id = 2")
    connection.execute("SELECT pg_logical_emit_message(true, 'x', 'y')")
    connection.execute("TRUNCATE k, t")
    connection.execute("SELECT pg_create_logical_replication_slot('streamed', 'pgoutput')")
    with connection.transaction():
        connection.execute("INSERT INTO k VALUES (10, 'ten', 10), (11, 'eleven', 11)")
        with suppress(_RolledBack), connection.transaction():
            connection.execute("INSERT INTO k VALUES (12, 'twelve', 12)")
            raise _RolledBack
        connection.execute("UPDATE k SET n = n + 1, id = id + 10")
        connection.execute("DELETE FROM k WHERE id = 20")


class _RolledBack(Exception):
    pass


def _copied(settings: ConnectSettings) -> bytes:
    columns = ", ".join(c.name if c in _BINARY else f"{_VALUES[c.type.name]}::text" for c in EVERY_TYPE)
    with WireConnection.connect(settings) as connection:
        sql = f"COPY (SELECT {columns} FROM public.t) TO STDOUT (FORMAT binary)"
        return b"".join(chunk.data.tobytes() for chunk in connection.copy_out(sql))


def _followed(settings: ConnectSettings, slot: str) -> bytes:
    data = b""
    with WireConnection.connect(settings, replication=True) as connection:
        options = _OPTIONS | ({"streaming": "on"} if slot == "streamed" else {})
        stream = connection.start_replication(slot, ZERO, options)
        stream.request_reply()
        while (chunk := stream.read(2.0)) is not None:
            data += chunk.data.tobytes()
        stream.stop()
    return data


def _session(server: PostgresServer, name: str) -> bytes:
    """All that a server says in a session as the target `session` holds it, taken on the way."""
    settings = server.settings(name)
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pass_on() -> None:
            ours, _ = listener.accept()
            with ours, socket.create_connection((settings.host, settings.port)) as theirs:
                threading.Thread(target=_pump, args=(ours, theirs, bytearray()), daemon=True).start()
                _pump(theirs, ours, seen)

        relay = threading.Thread(target=pass_on, daemon=True)
        relay.start()
        plain = TlsConfig(mode=TlsMode.DISABLE)
        direct = replace(settings, host="127.0.0.1", port=listener.getsockname()[1], tls=plain)
        with WireConnection.connect(direct, replication=True) as connection:
            connection.query("SELECT 1")
            list(connection.copy_out("COPY (SELECT * FROM public.k ORDER BY 1 LIMIT 3) TO STDOUT (FORMAT binary)"))
            connection.start_replication("plain", ZERO, _OPTIONS).read(5.0)
        relay.join()
    return bytes(seen)


def _pump(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            seen += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _value_bytes(directory: Path, number: int) -> bytes:
    """The field of the first copied row."""
    data = (directory / "copy_binary" / "every_type.bin").read_bytes()
    at = 5 + 19 + 2
    for index in range(number + 1):
        length = int.from_bytes(data[at : at + 4], "big", signed=True)
        if index == number:
            return data[at + 4 : at + 4 + max(0, length)]
        at += 4 + max(0, length)
    raise AssertionError
