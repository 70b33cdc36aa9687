"""The messages of the frontend/backend protocol 3.0, as bytes and values. No socket here.

What we send is built by functions, what we receive is read through `Body`, which turns every kind of damage into a
ProtocolError: a message that ends early never becomes an IndexError or a struct.error.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from headwater.errors import ProtocolError
from headwater.lsn import EndLsn

PROTOCOL_3_0 = 196608
SSL_REQUEST = struct.pack("!ii", 8, 80877103)
_CANCEL_REQUEST_CODE = 80877102

SYNC_END = b"Z"
ERROR = b"E"
NOTICE = b"N"
PARAMETER_STATUS = b"S"
NOTIFICATION = b"A"
COPY_DATA = b"d"
COPY_DONE = b"c"
COPY_OUT = b"H"
COPY_BOTH = b"W"
COPY_IN = b"G"
COMMAND_COMPLETE = b"C"
EMPTY_QUERY = b"I"
ROW_DESCRIPTION = b"T"
DATA_ROW = b"D"
AUTHENTICATION = b"R"
BACKEND_KEY = b"K"
NEGOTIATE_VERSION = b"v"

# What a server may send to a client that uses only simple queries, COPY and replication. Anything else means that we
# lost the position of the frames, and to wait for the length that such a byte seems to announce could wait for ever.
KNOWN_TYPES = frozenset(b"ZENSAdcHWGCITDRKv")

# The server builds messages in buffers of at most 1 GiB.
MAX_MESSAGE_BYTES = 1 << 30

# What may come before the server has accepted the role, and how long it may be, as in libpq: until then the other end may be
# any program.
BEFORE_LOGIN = MappingProxyType({AUTHENTICATION: 2000, NEGOTIATE_VERSION: 2000, ERROR: 30_000})
# All that a server may send until a session is ready. Postgres sends about 1 KiB; notices of a login trigger come on top.
MAX_START_BYTES = 1 << 20
WHILE_STARTING = MappingProxyType({bytes([kind]): MAX_START_BYTES for kind in KNOWN_TYPES})
# Postgres reports about 15 settings, and extensions may have theirs reported.
MAX_PARAMETERS = 200
MAX_PARAMETER_BYTES = 64 << 10


class Message(NamedTuple):
    kind: bytes
    body: bytes


class Body:
    """Reads a message's body front to back."""

    __slots__ = ("_bytes", "_what", "position")

    def __init__(self, body: bytes, what: str) -> None:
        self._bytes = body
        self._what = what
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if count < 0 or end > len(self._bytes):
            raise ProtocolError(f"{self._what} message ends early", offset=self.position)
        taken = self._bytes[self.position : end]
        self.position = end
        return taken

    def int16(self) -> int:
        return int.from_bytes(self.take(2), "big", signed=True)

    def int32(self) -> int:
        return int.from_bytes(self.take(4), "big", signed=True)

    def text(self) -> str:
        """A string that ends with a zero byte."""
        end = self._bytes.find(b"\0", self.position)
        if end < 0:
            raise ProtocolError(f"{self._what} message has a string without an end", offset=self.position)
        raw = self._bytes[self.position : end]
        self.position = end + 1
        # Before the session's encoding is settled a server may answer in any: losing a letter beats losing the error.
        return raw.decode("utf-8", errors="replace")

    def rest(self) -> bytes:
        return self.take(len(self._bytes) - self.position)

    @property
    def is_empty(self) -> bool:
        return self.position >= len(self._bytes)


@dataclass(frozen=True, slots=True)
class ErrorFields:
    """An ErrorResponse or NoticeResponse. `severity` and `routine` are never translated, the rest may be."""

    severity: str
    sqlstate: str
    message: str
    detail: str
    hint: str
    routine: str

    @property
    def ends_session(self) -> bool:
        return self.severity in ("FATAL", "PANIC")


def parse_error_fields(body: bytes) -> ErrorFields:
    reader = Body(body, "error")
    fields: dict[bytes, str] = {}
    while (code := reader.take(1)) != b"\0":
        fields[code] = reader.text()
    return ErrorFields(
        severity=fields.get(b"V") or fields.get(b"S", "ERROR"),
        sqlstate=fields.get(b"C", ""),
        message=fields.get(b"M", "no message given"),
        detail=fields.get(b"D", ""),
        hint=fields.get(b"H", ""),
        routine=fields.get(b"R", ""),
    )


def parse_parameter(body: bytes) -> tuple[str, str]:
    reader = Body(body, "parameter status")
    return reader.text(), reader.text()


def parse_backend_key(body: bytes) -> tuple[int, bytes]:
    reader = Body(body, "backend key")
    return reader.int32(), reader.rest()


def parse_column_names(body: bytes) -> list[str]:
    reader = Body(body, "row description")
    names = []
    for _ in range(reader.int16()):
        names.append(reader.text())
        reader.take(18)  # table, column number, type, its size and modifier, format
    return names


def parse_row(body: bytes) -> list[str | None]:
    reader = Body(body, "data row")
    values: list[str | None] = []
    for _ in range(reader.int16()):
        size = reader.int32()
        raw = None if size == -1 else reader.take(size)
        try:
            values.append(None if raw is None else raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ProtocolError("data row holds text that is not UTF-8", offset=reader.position) from error
    return values


def frame(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def startup(parameters: Mapping[str, str]) -> bytes:
    pairs = b"".join(_c_string(name) + _c_string(value) for name, value in parameters.items()) + b"\0"
    return struct.pack("!ii", len(pairs) + 8, PROTOCOL_3_0) + pairs


def query(sql: str) -> bytes:
    return frame(b"Q", _c_string(sql))


def password(text: str) -> bytes:
    return frame(b"p", _c_string(text))


def sasl_initial(mechanism: str, data: bytes) -> bytes:
    return frame(b"p", _c_string(mechanism) + struct.pack("!i", len(data)) + data)


def sasl_response(data: bytes) -> bytes:
    return frame(b"p", data)


def cancel_request(backend_pid: int, key: bytes) -> bytes:
    return struct.pack("!iii", 12 + len(key), _CANCEL_REQUEST_CODE, backend_pid) + key


def copy_done() -> bytes:
    return frame(COPY_DONE)


def terminate() -> bytes:
    return frame(b"X")


def standby_status(written: EndLsn, flushed: EndLsn, clock_microseconds: int, *, ask_reply: bool) -> bytes:
    """Flush and apply are the same to us: what is confirmed is durable and applied."""
    return frame(
        COPY_DATA,
        struct.pack(
            "!cQQQqB", b"r", written.value, flushed.value, flushed.value, clock_microseconds, 1 if ask_reply else 0
        ),
    )


def _c_string(text: str) -> bytes:
    raw = text.encode("utf-8")
    if b"\0" in raw:
        raise ProtocolError("text with a zero byte cannot be sent", hint="Remove the zero byte from the name or value.")
    return raw + b"\0"
