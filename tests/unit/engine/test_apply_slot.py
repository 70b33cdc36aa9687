"""The pipeline's slot on a new timeline: where it is followed from, also when the first attempts fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.contracts.stores import Lineage
from headwater.engine.apply import slot as slot_module
from headwater.engine.apply.lineage import SlotLineage
from headwater.engine.apply.slot import ApplySlot
from headwater.engine.source import Source
from headwater.engine.wake_up import WakeUp
from headwater.errors import ConnectionLost
from headwater.lsn import EndLsn
from headwater.source.timeline import ServerHistory
from headwater.wire.settings import ConnectSettings

CONFIRMED, ON_RECORD = EndLsn(1000), EndLsn(900)


@pytest.mark.invariant(10)
def test_a_slot_on_a_new_timeline_is_followed_from_what_is_on_record_also_after_an_attempt_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was confirmed without a record may not be on the new timeline: other transactions are, at the same positions."""
    begun: list[EndLsn] = []

    class Streams:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def begin(self, connection: object, start: EndLsn, *, binary: bool) -> object:
            begun.append(start)
            if len(begun) == 1:
                raise ConnectionLost("the connection was lost", hint="Wait.")
            return SimpleNamespace(start=start)

    class Session:
        def __enter__(self) -> Session:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    class NewTimeline:
        slot_name = "headwater_apply_1"
        recorded = Lineage("one", 1)

        def verdict(self, *_: object) -> None:
            pass

        def position(self, connection: object) -> EndLsn:
            return ON_RECORD

        def record(self, history: ServerHistory) -> None:
            pass

    monkeypatch.setattr(slot_module, "SlotStreams", Streams)
    monkeypatch.setattr(slot_module, "server_history", lambda connection: ServerHistory("one", 2, EndLsn(2000)))
    monkeypatch.setattr(slot_module, "connect", lambda settings: Session())
    monkeypatch.setattr(slot_module, "WireConnection", SimpleNamespace(connect=lambda *_, **options: Session()))
    server = cast(Any, SimpleNamespace(in_recovery=False))
    source = Source(ConnectSettings("localhost", 5432, "shop", "headwater"), server, "shop", 4)
    states = cast(Any, SimpleNamespace(timeline=1))
    slot = ApplySlot(source, cast(SlotLineage, NewTimeline()), states, cast(Any, None), WakeUp())
    with pytest.raises(ConnectionLost):
        slot.open(CONFIRMED, binary=True)
    assert slot.open(CONFIRMED, binary=True).start == ON_RECORD
    assert begun == [ON_RECORD, ON_RECORD]
    # From then on it is the server that is known.
    assert slot.open(CONFIRMED, binary=True).start == CONFIRMED
