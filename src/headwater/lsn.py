"""Positions in the write-ahead log: two types that don't mix.

A `CommitLsn` is where a commit record starts (Begin's final_lsn); it orders events. An `EndLsn` is a position up to which
everything is done; progress, SyncDone, Catchup and what is confirmed to Postgres are of this type. Comparing one with the
other is a decision that must be spelled out (`CommitLsn.at_or_past`), because mixing them up loses or doubles exactly one
transaction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from headwater.errors import ProtocolError

_TEXT = re.compile(r"[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}")


@dataclass(frozen=True, slots=True, eq=False)
class Lsn:
    """What both kinds share. Never used by itself."""

    value: int

    @classmethod
    def parse(cls, text: str) -> Self:
        if not _TEXT.fullmatch(text):
            raise ProtocolError("not a WAL position", detail=f"expected XXX/XXX in hexadecimal, found {text!r}")
        high, low = text.split("/")
        return cls(int(high, 16) << 32 | int(low, 16))

    def __str__(self) -> str:
        return f"{self.value >> 32:X}/{self.value & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.value == other.value

    def __lt__(self, other: Self) -> bool:
        return self.value < other.value if type(other) is type(self) else NotImplemented

    def __le__(self, other: Self) -> bool:
        return self.value <= other.value if type(other) is type(self) else NotImplemented

    def __gt__(self, other: Self) -> bool:
        return self.value > other.value if type(other) is type(self) else NotImplemented

    def __ge__(self, other: Self) -> bool:
        return self.value >= other.value if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.value))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CommitLsn(Lsn):
    """The start of a commit record: Begin's final_lsn."""

    def at_or_past(self, end: EndLsn) -> bool:
        """Whether this transaction lies wholly after what `end` covers."""
        return self.value >= end.value


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EndLsn(Lsn):
    """Everything before this position is done."""


ZERO = EndLsn(0)
