from __future__ import annotations

import inspect
import pickle

import pytest

from headwater import errors
from headwater.errors import HeadwaterError, ProtocolError, Retry, ServerError

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, HeadwaterError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_crosses_from_executor_to_driver_whole(cls: type[HeadwaterError]) -> None:
    error = pickle.loads(pickle.dumps(cls("m", detail="d", hint="h", retry=Retry.MANUAL)))
    assert type(error) is cls
    assert (error.message, error.detail, error.hint, error.retry) == ("m", "d", "h", Retry.MANUAL)


def test_what_an_error_carries_besides_survives_too() -> None:
    assert pickle.loads(pickle.dumps(ProtocolError("m", offset=7))).offset == 7
    assert pickle.loads(pickle.dumps(ServerError("m", sqlstate="42P01"))).sqlstate == "42P01"


def test_an_error_reads_as_message_detail_hint() -> None:
    assert str(HeadwaterError("no", detail="why", hint="do this")) == "no\ndetail: why\nhint: do this"
