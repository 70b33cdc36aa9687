"""Builds pgoutput messages by hand, as the protocol's documentation describes them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from headwater.schema.table import ColumnSchema, ReplicatedTableSchema, TableId, TableName, TableSchema
from headwater.schema.types import BUILT_IN
from headwater.wire.columns import Bytes

INT4, TEXT = 23, 25
Field = bytes | None | str
"""Bytes in binary form, None for NULL, "unchanged" for a value that was not sent."""


def table(id: int, name: str = "t", namespace: str = "public") -> ReplicatedTableSchema:
    columns = (
        ColumnSchema("id", BUILT_IN[INT4], nullable=False, attnum=1, primary_key=True),
        ColumnSchema("name", BUILT_IN[TEXT], attnum=2),
    )
    return ReplicatedTableSchema(TableSchema(TableId(id), TableName(namespace, name), columns))


def framed(message: bytes, wal_end: int = 0) -> bytes:
    payload = b"w" + struct.pack("!QQQ", 0, wal_end, 0) + message
    return b"d" + struct.pack("!I", len(payload) + 4) + payload


def keepalive(wal_end: int, reply: bool = False) -> bytes:
    payload = b"k" + struct.pack("!QQB", wal_end, 0, reply)
    return b"d" + struct.pack("!I", len(payload) + 4) + payload


def begin(commit_lsn: int, xid: int = 1, time: int = 0) -> bytes:
    return framed(b"B" + struct.pack("!QqI", commit_lsn, time, xid))


def commit(commit_lsn: int, end_lsn: int, time: int = 0) -> bytes:
    return framed(b"C" + struct.pack("!BQQq", 0, commit_lsn, end_lsn, time), end_lsn)


def relation(schema: ReplicatedTableSchema, identity: str = "d") -> bytes:
    body = b"R" + struct.pack("!I", schema.id)
    body += schema.name.namespace.encode() + b"\0" + schema.name.name.encode() + b"\0"
    body += identity.encode() + struct.pack("!H", len(schema.columns))
    for column in schema.columns:
        body += struct.pack("!B", column.primary_key) + column.name.encode() + b"\0"
        body += struct.pack("!Ii", column.type.oid, column.typmod)
    return framed(body)


def tuple_data(fields: Sequence[Field]) -> bytes:
    body = struct.pack("!H", len(fields))
    for field in fields:
        if field is None:
            body += b"n"
        elif isinstance(field, str):
            body += b"u"
        else:
            body += b"b" + struct.pack("!I", len(field)) + field
    return body


def row(id: int, name: str | None = "x") -> list[Field]:
    return [struct.pack("!i", id), None if name is None else name.encode()]


def insert(table_id: int, fields: Sequence[Field]) -> bytes:
    return framed(b"I" + struct.pack("!I", table_id) + b"N" + tuple_data(fields))


def update(table_id: int, fields: Sequence[Field], old_key: Sequence[Field] | None = None) -> bytes:
    old = b"K" + tuple_data(old_key) if old_key is not None else b""
    return framed(b"U" + struct.pack("!I", table_id) + old + b"N" + tuple_data(fields))


def delete(table_id: int, key: Sequence[Field]) -> bytes:
    return framed(b"D" + struct.pack("!I", table_id) + b"K" + tuple_data(key))


def truncate(*table_ids: int, cascade: bool = False, restart_identity: bool = False) -> bytes:
    options = cascade | restart_identity << 1
    return framed(b"T" + struct.pack("!IB", len(table_ids), options) + struct.pack(f"!{len(table_ids)}I", *table_ids))


def in_progress(message: bytes, xid: int) -> bytes:
    """A framed message as it stands in a block of a transaction in progress: with an xid behind its kind."""
    return framed(message[30:31] + struct.pack("!I", xid) + message[31:])


def stream_start(xid: int, first: bool = False) -> bytes:
    return framed(b"S" + struct.pack("!IB", xid, first))


def stream_stop() -> bytes:
    return framed(b"E")


def stream_commit(xid: int, commit_lsn: int, end_lsn: int, time: int = 0) -> bytes:
    return framed(b"c" + struct.pack("!IBQQq", xid, 0, commit_lsn, end_lsn, time), end_lsn)


def stream_abort(xid: int, subxid: int | None = None) -> bytes:
    return framed(b"A" + struct.pack("!II", xid, xid if subxid is None else subxid))


def as_array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8).copy()
