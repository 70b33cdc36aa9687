"""Source against lake, value by value: the oracle of the tests and of the demo.

Wait for a position, then compare every value of every row, exactly by type: decimals with their scale, NULL apart
from empty, floats by their bits, rows that came twice. Memory is bounded: tables larger than `BUCKET_ROWS` are split
on disk by a hash of their key, and compared a part at a time.

    wait_until(lambda: confirmed() >= position, 60, what="the lake to catch up")
    compare_table(connection, TableName("public", "orders"), open_lake(warehouse)).assert_equal()
"""

from __future__ import annotations

import math
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import Catalog

from headwater.schema.arrow import arrow_schema
from headwater.schema.table import ReplicatedTableSchema, TableName
from headwater.testing.lake_rows import read_lake
from headwater.testing.source_rows import Connection, describe, read_source

BUCKET_ROWS = 500_000
MOST_EXAMPLES = 5


def wait_until(
    condition: Callable[[], bool],
    timeout: float = 60.0,
    *,
    what: str = "the condition",
    interval: float = 0.05,
    still_good: Callable[[], None] | None = None,
) -> None:
    """Wait for something that can only be asked for; TimeoutError names it.

    `still_good` raises when waiting has become pointless, so that a failed pipeline says why instead of timing out.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if still_good is not None:
            still_good()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        time.sleep(interval)


def flush_position(connection: Connection) -> int:
    """How far the server's WAL is on disk: everything committed by now lies before it."""
    row = connection.execute("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
    return int(row[0]) if row is not None else 0


def confirmed_position(connection: Connection, slot_name: str) -> int:
    """The confirmed position of a slot, as the server reports it; 0 if there is no such slot."""
    row = connection.execute(
        "select confirmed_flush_lsn - '0/0'::pg_lsn from pg_replication_slots where slot_name = %s", [slot_name]
    ).fetchone()
    return int(row[0]) if row is not None and row[0] is not None else 0


@dataclass(frozen=True, slots=True)
class RowDifference:
    """One row that is not the same on both sides; None for a side that lacks it."""

    key: tuple[Any, ...]
    source: dict[str, Any] | None
    lake: dict[str, Any] | None

    def __str__(self) -> str:
        key = ", ".join(map(repr, self.key))
        if self.source is None or self.lake is None:
            here, lacking = ("lake", "source") if self.source is None else ("source", "lake")
            return f"({key}): in the {here}, not in the {lacking}: {_short(self.source or self.lake)}"
        changed = [name for name in self.source if not _same(self.source[name], self.lake[name])]
        return f"({key}): " + "; ".join(
            f"{name} is {_short(self.source[name])} in the source and {_short(self.lake[name])} in the lake"
            for name in changed
        )


@dataclass(frozen=True, slots=True)
class TableComparison:
    """What comparing one table found. A row that came twice is one that is extra."""

    table: TableName
    source_rows: int
    lake_rows: int
    differing: int
    missing: int
    extra: int
    examples: tuple[RowDifference, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.differing or self.missing or self.extra)

    def __str__(self) -> str:
        counts = f"{self.source_rows} rows in the source, {self.lake_rows} in the lake"
        if self.equal:
            return f"{self.table}: equal, {counts}"
        found = f"{self.differing} differing, {self.missing} missing, {self.extra} extra"
        return "\n  ".join([f"{self.table}: {found} ({counts})", *map(str, self.examples)])

    def assert_equal(self) -> None:
        assert self.equal, str(self)


def compare_table(
    connection: Connection,
    name: TableName,
    lake: Catalog,
    *,
    columns: Collection[str] | None = None,
    row_filter: str | None = None,
) -> TableComparison:
    """Compare a table that is not written to at the moment with its mirror: all of it, or what a publication sends of it."""
    schema = describe(connection, name, columns)
    return compare_rows(schema, read_source(connection, schema, row_filter), read_lake(lake, schema))


def compare_rows(
    schema: ReplicatedTableSchema,
    source: Iterable[pa.RecordBatch],
    lake: Iterable[pa.RecordBatch],
    *,
    bucket_rows: int = BUCKET_ROWS,
) -> TableComparison:
    """Compare two streams of batches that both have `arrow_schema(schema)`. Without a key the whole row is one."""
    declared = arrow_schema(schema)
    key = list(schema.key) or declared.names
    found: Counter[str] = Counter()
    examples: list[RowDifference] = []
    with tempfile.TemporaryDirectory(prefix="headwater-compare-") as directory:
        left = _Side(declared, key, Path(directory) / "source", bucket_rows)
        right = _Side(declared, key, Path(directory) / "lake", bucket_rows)
        left.take(source)
        right.take(lake)
        buckets = max(left.buckets(), right.buckets())
        for index in range(buckets):
            one, other = left.part(index, buckets), right.part(index, buckets)
            if _identical(one, other, key):
                continue
            for difference in _differences(one, other, key):
                found[_kind(difference)] += 1
                if len(examples) < MOST_EXAMPLES:
                    examples.append(difference)
    return TableComparison(
        schema.name,
        left.rows,
        right.rows,
        found["differing"],
        found["missing"],
        found["extra"],
        tuple(examples),
    )


class _Side:
    """The rows of one side: in memory while they are few, else in files of rows that share a hash of their key."""

    FILES = 64

    def __init__(self, schema: pa.Schema, key: list[str], directory: Path, bucket_rows: int) -> None:
        self._schema = schema
        self._key = key
        self._directory = directory
        self._bucket_rows = bucket_rows
        self._batches: list[pa.RecordBatch] = []
        self._files: list[pa.ipc.RecordBatchFileWriter] = []
        self.rows = 0

    def take(self, batches: Iterable[pa.RecordBatch]) -> None:
        for batch in batches:
            self.rows += len(batch)
            self._batches.append(batch)
            if self._files or self.rows > self._bucket_rows:
                self._spill()
        for writer in self._files:
            writer.close()

    def buckets(self) -> int:
        return self.FILES if self._files else 1

    def part(self, index: int, of: int) -> pa.Table:
        if self._files:
            with pa.ipc.open_file(self._path(index)) as reader:
                return reader.read_all()
        whole = pa.Table.from_batches(self._batches, self._schema)
        if of == 1:
            return whole
        return whole.filter(pa.array([number % of == index for number in _hashes(whole, self._key)], pa.bool_()))

    def _path(self, index: int) -> str:
        return str(self._directory / f"{index}.arrow")

    def _spill(self) -> None:
        if not self._files:
            self._directory.mkdir()
            self._files = [pa.ipc.new_file(self._path(index), self._schema) for index in range(self.FILES)]
        for batch in self._batches:
            rows: dict[int, list[int]] = defaultdict(list)
            for row, number in enumerate(_hashes(batch, self._key)):
                rows[number % self.FILES].append(row)
            for index, taken in rows.items():
                self._files[index].write_batch(batch.take(pa.array(taken)))
        self._batches = []


def _hashes(rows: pa.RecordBatch | pa.Table, key: list[str]) -> Iterator[int]:
    columns = (rows.column(name).to_pylist() for name in key)
    return (zlib.crc32(repr([_exact(value) for value in row]).encode()) for row in zip(*columns, strict=True))


def _identical(source: pa.Table, lake: pa.Table, key: list[str]) -> bool:
    """A fast check, conclusive when it is true: sorted by the key, every buffer is equal."""
    if len(source) != len(lake):
        return False
    if any(pa.types.is_nested(source.schema.field(name).type) for name in key):
        return False
    order = [(name, "ascending") for name in key]
    return bool(_bits(source.sort_by(order)).equals(_bits(lake.sort_by(order))))


def _bits(table: pa.Table) -> pa.Table:
    """Floats as integers: to Arrow -0.0 equals 0.0, and NaN does not equal itself."""
    for index, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            whole = pa.chunked_array([table.column(index).combine_chunks()], field.type)
            same_width = pa.int32() if pa.types.is_float32(field.type) else pa.int64()
            viewed = pa.chunked_array([chunk.view(same_width) for chunk in whole.chunks], same_width)
            table = table.set_column(index, field.name, viewed)
    return table


def _differences(source: pa.Table, lake: pa.Table, key: list[str]) -> Iterator[RowDifference]:
    left, right = _by_key(source, key), _by_key(lake, key)
    for found in left.keys() | right.keys():
        ours, theirs = left.get(found, []), right.get(found, [])
        # Rows that are the same on both sides cancel out; what is left over differs, is missing or is one too many.
        unmatched = []
        for row in ours:
            place = next((place for place, other in enumerate(theirs) if _same(row, other)), None)
            if place is None:
                unmatched.append(row)
            else:
                del theirs[place]
        ours = unmatched
        for number in range(max(len(ours), len(theirs))):
            one = ours[number] if number < len(ours) else None
            other = theirs[number] if number < len(theirs) else None
            either = one or other or {}
            yield RowDifference(tuple(either[name] for name in key), one, other)


def _by_key(table: pa.Table, key: list[str]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        rows[repr([_exact(row[name]) for name in key])].append(row)
    return rows


def _exact(value: object) -> object:
    """Something that is equal only for equal values: NaN to NaN, 1.0 not to 1, -0.0 not to 0.0."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    if isinstance(value, dict):
        return [(name, _exact(item)) for name, item in value.items()]
    return repr(value)


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and _exact(one) == _exact(other)


def _kind(difference: RowDifference) -> str:
    if difference.source is None:
        return "extra"
    return "missing" if difference.lake is None else "differing"


def _short(value: object, most: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
