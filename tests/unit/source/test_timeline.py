"""History files, as servers write them."""

from __future__ import annotations

import pytest

from headwater.errors import ProtocolError
from headwater.lsn import EndLsn
from headwater.source.timeline import parse_history


def test_a_history_says_where_each_earlier_timeline_ended() -> None:
    content = "1\t0/3000148\tno recovery target specified\n\n2\t1/A0\tbefore 2000-01-01 00:00:00+00\n# a remark\n"
    assert parse_history(content) == {1: EndLsn(0x3000148), 2: EndLsn(0x1000000A0)}
    assert parse_history("") == {}


@pytest.mark.parametrize("content", ["one\t0/1\n", "1\n", "1\tnowhere\treason\n"])
def test_what_is_no_history_is_refused(content: str) -> None:
    with pytest.raises(ProtocolError):
        parse_history(content)
