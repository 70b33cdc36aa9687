"""What a run of changes amounts to, per key: columnar and pure, no Spark.

Each change deletes its old key (a DELETE, or an UPDATE that changed the key) and upserts its new one; the last change of a key
wins (invariants 13 and 14). An identity's index is checked row by row, so at every moment a key names one row at most, and
playing the changes in order against a map of key to row is exact; this module does the same without a loop over rows.

Unchanged TOAST values (invariant 12) are taken from the row's previous version in the run, through chains and key changes.
Where the run holds none, the row remembers the key it had in the target before the run, and which columns it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.destinations.iceberg.keys import Codes, encode_rows
from headwater.events import DELETE, INSERT, NO_OLD, OLD_FULL, UPDATE, ChangeRun

Flags = npt.NDArray[np.bool_]
Indexes = npt.NDArray[np.int64]

_TARGET, _SOURCE = -1, -2
"""Where the version before a row's first one lies: in the target, or nowhere that we may trust but the source."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Upserts that lack values. All arrays have an element per such upsert."""

    rows: Indexes
    """Positions in the upserts."""
    origin: pa.Table
    """The key each had in the target before the run."""
    in_target: Flags
    """False where the target cannot have the value: an INSERT, or a row that the run itself had deleted before."""
    last: Indexes
    """The run's last change of each, by its place in the run."""
    arrived: Indexes
    """The change that gave each the key it has at the end; the first of the run, if it had it before."""
    missing: dict[str, Flags] = field(default_factory=dict)
    """Per column, which of these upserts lack it."""


@dataclass(frozen=True, slots=True)
class NetChanges:
    """One row per key, in deletes or in upserts."""

    deletes: pa.Table
    """Keys only."""
    upserts: pa.Table
    """All columns; missing values are NULL and listed in `pending`."""
    pending: Pending | None = None
    expected: int = 0
    """How many keys began with an UPDATE or a DELETE: the target must have a row of each."""
    arrivals: Flags | None = None
    """Per upsert, whether its key began with an INSERT, or with a row that took it: the target should have none."""


def net_changes(run: ChangeRun, key: tuple[str, ...]) -> NetChanges:
    """Play a run. `new` and `old` must be in the lake's types already."""
    run = fill_from_old(run, key)
    events = _key_events(run, key)
    last = np.full(events.count, -1, np.int64)
    last[events.code] = np.arange(len(events.code))
    last = np.sort(last[last >= 0])
    final = events.row[last]
    is_upsert = events.upsert[last]
    upsert_rows, delete_rows = final[is_upsert], final[~is_upsert]
    arrives = _arrives(run, events, last)
    expected, arrivals = int(np.count_nonzero(~arrives)), arrives[is_upsert]
    deletes = (run.old if run.old is not None else run.new).select(key).take(pa.array(delete_rows))
    if not any(flags.any() for flags in run.unchanged.values()):
        # In the usual batch each key comes once: nothing has to be copied.
        whole = len(upsert_rows) == len(run)
        upserts = run.new if whole else run.new.take(pa.array(upsert_rows))
        return NetChanges(deletes, upserts, None, expected, arrivals)
    upserts, pending = _with_previous_values(run, key, events, upsert_rows)
    return NetChanges(deletes, upserts, pending, expected, arrivals)


def fill_from_old(run: ChangeRun, key: tuple[str, ...] = ()) -> ChangeRun:
    """With REPLICA IDENTITY FULL the old tuple has every value, also those the new one calls unchanged.

    Of a key that is stored out of line the server sends the old one, and calls the new one unchanged.
    """
    if run.old is None or not run.unchanged:
        return run
    full = run.old_kind == OLD_FULL
    columns, unchanged = dict(zip(run.new.column_names, run.new.columns, strict=True)), dict(run.unchanged)
    for name, flags in run.unchanged.items():
        has_value = run.old_kind != NO_OLD if name in key else full
        fill = flags & has_value
        if fill.any():
            index = np.arange(len(run)) + np.where(fill, len(run), 0)
            both = pa.chunked_array(columns[name].chunks + run.old.column(name).chunks, type=columns[name].type)
            columns[name] = both.take(pa.array(index))
            unchanged[name] = flags & ~has_value
    return ChangeRun(
        run.schema, run.op, run.commit_lsn, run.ordinal, run.transaction, run.position,
        pa.table(columns, schema=run.new.schema), run.old_kind, run.old, unchanged,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _KeyEvents:
    """Deletes of old keys and upserts of new ones, in order: at most two a change."""

    code: Codes
    row: Indexes
    upsert: Flags
    count: int
    source_event: Indexes
    """Per change, the event whose key names the row's previous version; -1 for a DELETE."""


def _key_events(run: ChangeRun, key: tuple[str, ...]) -> _KeyEvents:
    size = len(run)
    has_new, has_old = run.op != DELETE, run.old_kind != NO_OLD
    old = run.old.select(key) if run.old is not None else run.new.select(key).slice(0, 0)
    (new_code, old_code), count = encode_rows([run.new.select(key), old], key)
    if not len(old_code):
        old_code = np.full(size, -1, np.int64)
    moved = has_old & ((run.op == DELETE) | (old_code != new_code))
    # A change's delete comes before its upsert: even and odd places.
    used = np.empty(2 * size, np.bool_)
    used[0::2], used[1::2] = moved, has_new
    codes = np.empty(2 * size, np.int64)
    codes[0::2], codes[1::2] = old_code, new_code
    places = np.flatnonzero(used)
    number = np.cumsum(used) - 1
    source_event = np.where(moved, number[0::2], number[1::2])
    source_event[~has_new] = -1
    return _KeyEvents(codes[places], places >> 1, (places & 1).astype(np.bool_), count, source_event)


def _arrives(run: ChangeRun, events: _KeyEvents, last: Indexes) -> Flags:
    """Per key, by its last event: whether its first one put a row there that was none before."""
    first = np.zeros(events.count, np.int64)
    first[events.code[::-1]] = np.arange(len(events.code))[::-1]
    event = first[events.code[last]]
    row = events.row[event]
    # An update finds its row under the key of its source event: the new key, unless it moved the row.
    stays = (run.op[row] == UPDATE) & (events.source_event[row] == event)
    arrives: Flags = events.upsert[event] & ~stays
    return arrives


def _with_previous_values(
    run: ChangeRun, key: tuple[str, ...], events: _KeyEvents, upsert_rows: Indexes
) -> tuple[pa.Table, Pending | None]:
    previous = _previous_version(run, events)
    columns = {}
    missing: dict[str, Flags] = {}
    any_missing = np.zeros(len(upsert_rows), np.bool_)
    first_version = upsert_rows.copy()
    for name, column in zip(run.new.column_names, run.new.columns, strict=True):
        flags = run.unchanged.get(name)
        if flags is None or not flags.any():
            columns[name] = column.take(pa.array(upsert_rows))
            continue
        holder = _holder(flags, previous)[upsert_rows]
        columns[name] = column.take(pa.array(holder))
        lacks = flags[holder]
        if lacks.any():
            missing[name] = lacks
            any_missing |= lacks
            # Whatever column lacks its value, it does so at the same place: where the chain of versions begins.
            first_version[lacks] = holder[lacks]
    upserts = pa.table(columns, schema=run.new.schema)
    if not missing:
        return upserts, None
    rows = np.flatnonzero(any_missing)
    first, last = first_version[rows], upsert_rows[rows]
    in_place = (run.op == UPDATE) & events.upsert[events.source_event]
    return upserts, Pending(
        rows=rows,
        origin=_origin_keys(run, key, events, first),
        in_target=previous[first] == _TARGET,
        last=last,
        arrived=_holder(in_place, previous)[last],
        missing={name: flags[rows] for name, flags in missing.items()},
    )


def _previous_version(run: ChangeRun, events: _KeyEvents) -> Indexes:
    """Per change, the row of its previous version in the run, or where else that lies."""
    order = np.argsort(events.code, kind="stable")
    before = np.full(len(order), -1, np.int64)
    same = events.code[order[1:]] == events.code[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    previous = np.full(len(run), _TARGET, np.int64)
    updates = np.flatnonzero(run.op == UPDATE)
    event = before[events.source_event[updates]]
    known = event >= 0
    previous[updates[known]] = np.where(events.upsert[event[known]], events.row[event[known]], _SOURCE)
    # A row filter turned an UPDATE into this INSERT: what the target may have under the key is some other row's past.
    previous[run.op == INSERT] = _SOURCE
    return previous


def _holder(unchanged: Flags, previous: Indexes) -> Indexes:
    """Per change, the version that holds one column's value, or the first version if none does."""
    here = np.arange(len(unchanged))
    pointer = np.where(unchanged & (previous >= 0), previous, here)
    while True:
        further = pointer[pointer]
        if np.array_equal(further, pointer):
            return pointer
        pointer = further


def _origin_keys(run: ChangeRun, key: tuple[str, ...], events: _KeyEvents, rows: Indexes) -> pa.Table:
    """The key each of these changes found its row under: the old one if it changed the key, else the new one."""
    moved = ~events.upsert[events.source_event[rows]]
    new = run.new.select(key)
    if not moved.any():
        return new.take(pa.array(rows))
    assert run.old is not None
    return pa.concat_tables([new, run.old.select(key)]).take(pa.array(rows + np.where(moved, len(run), 0)))
