"""A table sync worker that connects again: which servers it may go on with, and which it has to wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from headwater.engine.follow.slot_stream import StreamOptions
from headwater.engine.run import Run
from headwater.engine.table_sync import stream as sync_stream
from headwater.engine.table_sync.slot import SyncSlot
from headwater.engine.table_sync.stream import SlotLostMeanwhile, SyncStream, TimelineChangedMeanwhile
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
    made: list[EndLsn] = []

    def start(connection: object, name: str, start: EndLsn, *rest: object) -> object:
        made.append(start)
        return SimpleNamespace(close=lambda: None, fell_silent=False)

    closed = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(sync_stream, "SlotStream", start)
    monkeypatch.setattr(sync_stream, "server_history", lambda connection: found)
    monkeypatch.setattr(sync_stream, "WireConnection", SimpleNamespace(connect=lambda *_, **options: closed))
    server = SimpleNamespace(system_identifier="one", in_recovery=in_recovery)
    lock = SimpleNamespace(is_out_of_reach=lambda: False)
    run = cast(Run, SimpleNamespace(server=server, decoder=object, lock=lock, require_lock=lambda: None))
    slot = SyncSlot(cast(WireConnection, closed), "slot", CONFIRMED, "", 1)
    settings = ConnectSettings("localhost", 5432, "shop", "headwater")
    stream = SyncStream(run, slot, settings, "table t", StreamOptions("shop", True, 1.0), WakeUp())
    stream.begin()
    if error is None:
        stream.connect_again()
        assert made == [CONFIRMED, CONFIRMED]
    else:
        with pytest.raises(error):
            stream.connect_again()
