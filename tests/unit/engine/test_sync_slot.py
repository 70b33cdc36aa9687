"""A table sync worker that connects again: which servers it may go on with, and which it has to wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.engine.source import Source
from headwater.engine.table_sync import slot as slot_module
from headwater.engine.table_sync.slot import SlotLostMeanwhile, SyncSlot, TimelineChangedMeanwhile
from headwater.engine.wake_up import WakeUp
from headwater.lsn import EndLsn
from headwater.source.slot_errors import StandbyBehind
from headwater.source.timeline import ServerHistory
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings

CONFIRMED = EndLsn(1000)


@pytest.mark.promise("after a lost walsender nothing is lost and nothing written twice")
@pytest.mark.parametrize(
    ("in_recovery", "found", "error"),
    [
        (False, ServerHistory("one", 1, EndLsn(1000)), None),
        (False, ServerHistory("one", 1, EndLsn(999)), SlotLostMeanwhile),
        (False, ServerHistory("two", 1, EndLsn(1000)), SlotLostMeanwhile),
        (False, ServerHistory("one", 2, EndLsn(1000)), TimelineChangedMeanwhile),
        (True, ServerHistory("one", 1, EndLsn(999)), StandbyBehind),
        (True, ServerHistory("two", 1, EndLsn(999)), SlotLostMeanwhile),
    ],
)
def test_a_copy_is_given_up_only_when_its_server_is_another_one(
    monkeypatch: pytest.MonkeyPatch, in_recovery: bool, found: ServerHistory, error: type[Exception] | None
) -> None:
    begun: list[EndLsn] = []

    class Streams:
        def __init__(self, *_: object) -> None:
            pass

        def begin(self, connection: object, start: EndLsn, *, binary: bool) -> object:
            begun.append(start)
            return SimpleNamespace(start=start)

    closed = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(slot_module, "SlotStreams", Streams)
    monkeypatch.setattr(slot_module, "server_history", lambda connection: found)
    monkeypatch.setattr(slot_module, "WireConnection", SimpleNamespace(connect=lambda *_, **options: closed))
    server = cast(Any, SimpleNamespace(system_identifier="one", in_recovery=in_recovery))
    source = Source(ConnectSettings("localhost", 5432, "shop", "headwater"), server, "shop", 4)
    guard = cast(Any, SimpleNamespace(lock=None, require_lock=lambda: None))
    slot = SyncSlot(source, guard, WakeUp(), "table t", "slot", cast(WireConnection, closed), CONFIRMED, "", 1)
    slot.open(CONFIRMED, binary=True)
    if error is None:
        slot.open(CONFIRMED, binary=True)
        assert begun == [CONFIRMED, CONFIRMED]
    else:
        with pytest.raises(error):
            slot.open(CONFIRMED, binary=True)
