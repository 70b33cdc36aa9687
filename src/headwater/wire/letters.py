"""The bytes that say what a message, a tuple or a field is, as the protocol's documentation names them."""

from __future__ import annotations

from headwater.changes import DELETE as DELETE
from headwater.changes import INSERT as INSERT
from headwater.changes import OLD_FULL as OLD_FULL
from headwater.changes import OLD_KEY as OLD_KEY
from headwater.changes import UPDATE as UPDATE

# Frames, and what is in them.
COPY_DATA, XLOG_DATA, PRIMARY_KEEPALIVE = ord("d"), ord("w"), ord("k")
FRAME_HEADER = 5
"""The kind and the length, which counts itself but not the kind."""
XLOG_DATA_HEADER = 25
"""Its kind, start, WAL end and clock: then comes a message of pgoutput."""
KEEPALIVE_SIZE = 18
BEGIN, COMMIT, ORIGIN, RELATION, TYPE, MESSAGE = ord("B"), ord("C"), ord("O"), ord("R"), ord("Y"), ord("M")
TRUNCATE = ord("T")
STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT = ord("S"), ord("E"), ord("c"), ord("A")
# Tuples, and what stands for a field of one.
NEW_ROW = ord("N")
FIELD_NULL, FIELD_UNCHANGED, FIELD_BINARY, FIELD_TEXT = ord("n"), ord("u"), ord("b"), ord("t")
