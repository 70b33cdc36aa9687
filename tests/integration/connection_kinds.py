"""The kinds of connections that Headwater opens: a test of what holds for every connection runs with each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater.source.session import connect
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings

Ask = Callable[[ConnectSettings, str], Any]
"""Opens a session, asks for one value, closes it; the value as text."""


def by_wire(settings: ConnectSettings, query: str) -> Any:
    with WireConnection.connect(settings) as connection:
        (row,) = connection.query(query)
        return next(iter(row.values()))


def by_replication(settings: ConnectSettings, query: str) -> Any:
    with WireConnection.connect(settings, replication=True) as connection:
        (row,) = connection.query(query)
        return next(iter(row.values()))


def by_psycopg(settings: ConnectSettings, query: str) -> Any:
    with connect(settings) as connection:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return None if row[0] is None else str(row[0])


each_connection_kind = pytest.mark.parametrize("ask", [by_wire, by_replication, by_psycopg])
