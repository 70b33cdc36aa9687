from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ProtocolError
from headwater.lsn import CommitLsn, EndLsn


@given(st.integers(0, 2**64 - 1))
def test_a_position_survives_its_text_and_pickling(value: int) -> None:
    lsn = EndLsn(value)
    assert EndLsn.parse(str(lsn)) == lsn
    assert pickle.loads(pickle.dumps(lsn)) == lsn


@pytest.mark.invariant(3)
def test_the_two_kinds_of_position_do_not_mix() -> None:
    assert CommitLsn(5) != EndLsn(5)
    with pytest.raises(TypeError):
        CommitLsn(5) < EndLsn(6)  # type: ignore[operator]  # noqa: B015
    with pytest.raises(TypeError):
        max(CommitLsn(5), EndLsn(6))


@pytest.mark.invariant(3)
def test_a_transaction_that_starts_where_a_position_ends_lies_after_it() -> None:
    assert CommitLsn(100).at_or_past(EndLsn(100))
    assert not CommitLsn(99).at_or_past(EndLsn(100))


@pytest.mark.parametrize("text", ["", "0", "0/", "/0", "0/G", "0/123456789", "0/1 ", "-1/0"])
def test_text_that_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="not a WAL position"):
        EndLsn.parse(text)
