from __future__ import annotations

import inspect
import json
import pickle

import pytest

from headwater import errors
from headwater.errors import (
    HeadwaterError,
    Meaning,
    ProtocolError,
    Retry,
    ServerError,
    error_from_json,
    error_to_json,
    meaning,
    passes,
)

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, HeadwaterError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_crosses_from_executor_to_driver_whole(cls: type[HeadwaterError]) -> None:
    error = pickle.loads(pickle.dumps(cls("m", detail="d", hint="h", retry=Retry.MANUAL)))
    assert type(error) is cls
    assert (error.message, error.detail, error.hint, error.retry) == ("m", "d", "h", Retry.MANUAL)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_itself_again_after_json(cls: type[HeadwaterError]) -> None:
    error = cls("m", detail="d", hint="h", retry=Retry.MANUAL)
    again = error_from_json(json.loads(json.dumps(error_to_json(error))))
    assert type(again) is cls
    assert vars(again) == vars(error)
    with pytest.raises((KeyError, ValueError)):
        error_from_json({**error_to_json(error), "class": "Retry"})


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_does_not_change_after_it_was_made_and_copies_keep_its_cause(cls: type[HeadwaterError]) -> None:
    try:
        raise cls("m", detail="d") from ValueError("why")
    except HeadwaterError as raised:
        error = raised
    for name in ("message", "detail", "hint", "retry", "table_id"):
        with pytest.raises(AttributeError):
            setattr(error, name, None)
    copy = error.with_retry(Retry.MANUAL).for_table(7, "public.t")
    assert type(copy) is cls
    assert (copy.message, copy.retry, copy.table_id) == ("table public.t: m", Retry.MANUAL, 7)
    assert str(copy.args[0]) == copy.message
    assert (copy.__cause__, copy.__traceback__) == (error.__cause__, error.__traceback__)
    assert (error.message, error.table_id) == ("m", None)


def test_each_error_has_one_meaning_and_infrastructure_is_waited_for() -> None:
    assert {cls for cls in CLASSES if meaning(cls("m")) is Meaning.WAIT} == {
        errors.ConnectError,
        errors.ConnectionLost,
        errors.LimitReached,
        errors.StoreUnavailable,
        errors.DestinationUnavailable,
        errors.LakeCommitUnknown,
        errors.SpoolError,
    }
    assert {cls for cls in CLASSES if meaning(cls("m")) is Meaning.FATAL} == {errors.SparkLost, errors.PipelineLocked}
    assert all(passes(cls("m")) for cls in CLASSES if meaning(cls("m")) is Meaning.WAIT)
    assert not passes(HeadwaterError("m"))


def test_what_an_error_carries_besides_survives_too() -> None:
    assert pickle.loads(pickle.dumps(ProtocolError("m", offset=7))).offset == 7
    assert pickle.loads(pickle.dumps(ServerError("m", sqlstate="42P01"))).sqlstate == "42P01"


def test_an_error_reads_as_message_detail_hint() -> None:
    assert str(HeadwaterError("no", detail="why", hint="do this")) == "no\ndetail: why\nhint: do this"
