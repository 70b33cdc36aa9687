"""What damaged bytes are given to: everything of `headwater.wire` that reads what a server sends.

Each target returns what came out, as a value that can be compared, or raises HeadwaterError. Anything else is a defect.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.changes import ChangeRun
from headwater.errors import ConnectionLost, HeadwaterError, ProtocolError
from headwater.events import EventBatch
from headwater.lsn import ZERO, CommitLsn, EndLsn
from headwater.schema.table import (
    ColumnSchema,
    ReplicaIdentity,
    ReplicatedTableSchema,
    TableSchema,
)
from headwater.schema.types import BUILT_IN, other
from headwater.secret import Secret
from headwater.wire.chunks import Inbox
from headwater.wire.columns import decode_column
from headwater.wire.connection import WireConnection
from headwater.wire.copy_binary import CopyDecoder
from headwater.wire.letters import FIELD_BINARY, FIELD_TEXT
from headwater.wire.pgoutput import Ownership, PgOutputDecoder
from headwater.wire.relation import RelationMessage
from headwater.wire.replication import ReplicationStream
from headwater.wire.settings import ConnectSettings
from headwater.wire.transport import Transport

EVERY_TYPE = (
    *(ColumnSchema(f"c{oid}", type) for oid, type in sorted(BUILT_IN.items())),
    ColumnSchema("c_10_2", BUILT_IN[1700], typmod=((10 << 16) | 2) + 4),
    ColumnSchema("c_38_37", BUILT_IN[1700], typmod=((38 << 16) | 37) + 4),
    ColumnSchema("c_decimals", BUILT_IN[1231], typmod=((20 << 16) | 4) + 4),
    ColumnSchema("c_point", other(600, "point")),
)
"""A column of every type that is decoded, in the order of the captured tables."""


class _Bytes:
    """Gives the bytes to an inbox in pieces of any size, then ends as a lost connection does."""

    def __init__(self, data: bytes, dice: random.Random | None) -> None:
        self._data, self._dice, self._at = data, dice, 0

    def receive_into(self, view: memoryview) -> int:
        left = len(self._data) - self._at
        if not left:
            raise ConnectionLost("the bytes are at their end")
        wanted = left if self._dice is None else self._dice.choice((1, 7, 64, 1000))
        count = min(left, len(view), wanted)
        view[:count] = self._data[self._at : self._at + count]
        self._at += count
        return count


def _chunks(data: bytes, dice: random.Random | None) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    inbox, found = Inbox(_Bytes(data, dice)), []
    try:
        while True:
            inbox.split_copy_data()
            if inbox.whole_bytes:
                found.append(inbox.take_chunk().data)
            elif inbox.meets_other and inbox.message() is not None:
                raise ProtocolError("the fuzzer's stream ends with a message of another kind")
            else:
                inbox.receive()
    except ConnectionLost:
        return found


def _own(relation: RelationMessage, commit_lsn: CommitLsn) -> Ownership | None:
    """What the catalog would say if it said the same as the stream, as the engine requires."""
    names = [column.name for column in relation.columns]
    if len(set(names)) != len(names) or relation.replica_identity not in "dnfi" or not relation.replica_identity:
        return None
    columns = tuple(
        ColumnSchema(c.name, BUILT_IN.get(c.type_oid, other(c.type_oid, "other")), typmod=c.typmod, primary_key=c.key)
        for c in relation.columns
    )
    schema = TableSchema(
        relation.id, relation.name, columns, replica_identity=ReplicaIdentity(relation.replica_identity)
    )
    return Ownership(ReplicatedTableSchema(schema), ZERO)


def pgoutput(data: bytes, dice: random.Random | None) -> object:
    decoder = PgOutputDecoder()
    sealed: list[object] = []
    for chunk in _chunks(data, dice):
        decoder.feed(chunk)
        for position in (decoder.idle_position, decoder.whole_until, decoder.received_position, decoder.end_position):
            assert position is None or isinstance(position, EndLsn)
        if dice is not None and dice.random() < 0.3 and (changes := decoder.seal(_own)) is not None:
            sealed += _shown(changes)
    if (changes := decoder.seal(_own)) is not None:
        sealed += _shown(changes)
    return sorted(sealed, key=repr)


def _shown(changes: EventBatch) -> list[object]:
    found: list[object] = []
    for table, steps in changes.tables.items():
        for step in steps:
            if not isinstance(step, ChangeRun):
                found.append((table, "truncate", str(step.commit_lsn)))
                continue
            for half in (step.new, step.old):
                if half is not None:
                    half.validate(full=True)
            numbered = zip(step.commit_lsn.tolist(), step.ordinal.tolist(), step.op.tolist(), strict=True)
            found += [(table, *line) for line in numbered]
    return found


def copy_binary(data: bytes, dice: random.Random | None) -> object:
    decoder = CopyDecoder(EVERY_TYPE)
    rows = 0
    for chunk in _chunks(data, dice):
        batch = decoder.decode(chunk)
        if batch is not None:
            batch.validate(full=True)
            rows += batch.num_rows
    return rows, decoder.ended


def values(data: bytes, dice: random.Random | None) -> object:
    """The first byte chooses the type, the rest is one value, or as many as its length divides into."""
    if not data:
        return None
    chosen = EVERY_TYPE[data[0] % len(EVERY_TYPE)]
    buffer = np.frombuffer(bytearray(data[1:]), np.uint8)
    shown: list[object] = []
    for fmt in (FIELD_BINARY, FIELD_TEXT):
        for count in (1, 2, 3):
            length = len(buffer) // count
            lengths = np.full(count, length, np.int64)
            try:
                array: pa.Array = decode_column(chosen, buffer, np.arange(count, dtype=np.int64) * length, lengths, fmt)
            except HeadwaterError as error:
                shown.append(type(error).__name__)
            else:
                array.validate(full=True)
                shown.append(len(array))
    return shown


_SETTINGS = ConnectSettings(
    host="localhost", port=1, database="d", username="u", password=Secret("pencil"), connect_timeout_seconds=5.0
)


def session(data: bytes, dice: random.Random | None) -> object:
    """A server's whole side of a session that starts, asks, copies, then follows a slot; it has hung up behind the bytes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        transport = Transport(ours, "the fuzzer")
        connection = WireConnection(_SETTINGS, transport)
        try:
            connection._start_session(True, {})
            connection.query("SELECT 1")
            copied = sum(len(chunk.data) for chunk in connection.copy_out("COPY"))
            stream: ReplicationStream = connection.start_replication("slot", ZERO, {})
            followed = 0
            while (chunk := stream.read(1.0)) is not None:
                followed += len(chunk.data)
            return copied, followed
        finally:
            transport.close()


Target = Callable[[bytes, random.Random | None], object]
TARGETS: dict[str, Target] = {
    "pgoutput": pgoutput,
    "copy_binary": copy_binary,
    "values": values,
    "session": session,
}
CUT_ANYWHERE = frozenset({"pgoutput", "copy_binary"})
"""Targets whose outcome does not depend on how the bytes are cut into pieces."""
