"""A batch of few rows in very many columns, beside the same number of rows in few: what each column costs in planning."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.setting import Clock, Figure, Setting, wait_confirmed, wait_ready
from benchmarks.visible import middle
from headwater.engine.pipeline import Pipeline
from headwater.testing.source_rows import Connection

COLUMNS = {"narrow": 15, "wide": 1500}
ROWS = 49
WARM_UP = 4
ROUNDS = 6
KINDS = (
    ("int", "i"),
    ("text", "'t' || i"),
    ("numeric(12,2)", "i + 0.5"),
    # A row has to fit into a page of 8 kB: every other one is NULL.
    ("timestamptz", "case when mod({n}, 2) = 0 then timestamptz '2026-01-01' + i * interval '1 s' end"),
)
MARK = 8.0
"""Room above the one run there was, 5.5 x (8.4 s and 1.53 s), on two cores that others kept busy (load 8.8)."""


def run(setting: Setting) -> Iterator[Figure]:
    database = setting.database()
    found: dict[str, list[float]] = {name: [] for name in COLUMNS}
    with setting.server.connect(database) as connection:
        for name, columns in COLUMNS.items():
            _make_table(connection, name, columns)
        connection.execute("create publication bench for table narrow, wide")
        with setting.running(database, 35) as pipeline:
            wait_ready(pipeline, len(COLUMNS))
            # In turns, so that what else the machine does, and the JVM's compiler, count for both.
            for round in range(WARM_UP + ROUNDS):
                for name in COLUMNS:
                    seconds = _batch(connection, pipeline, name, round)
                    if round >= WARM_UP:
                        found[name].append(seconds)
    setting.server.drop_database(database)
    narrow, wide = middle(found["narrow"]), middle(found["wide"])
    what = f"a batch of {ROWS} rows in {COLUMNS['wide']:,} columns, beside {COLUMNS['narrow']}"
    value = f"{wide:.1f} s, {narrow:.2f} s"
    yield Figure(what, value, f"{wide / narrow:.1f} x", f"{MARK:.0f} x", wide / narrow < MARK)


def _batch(connection: Connection, pipeline: Pipeline, table: str, round: int) -> float:
    """Updates, inserts and deletes in one transaction, until they are confirmed."""
    first, clock = 1000 + 10 * round, Clock()
    with connection.transaction():
        connection.execute(f"update {table} set c1 = c1 + 1 where id <= 30")
        connection.execute(_insert(table), [first, first + 9])
        connection.execute(f"delete from {table} where id between %s and %s", [100 + 9 * round, 108 + 9 * round])
    row = connection.execute("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
    assert row is not None
    wait_confirmed(pipeline, int(row[0]))
    return clock.seconds


def _make_table(connection: Connection, table: str, columns: int) -> None:
    listed = ", ".join(f"c{n} {_kind(n, columns)[0]}" for n in range(1, columns))
    connection.execute(f"create table {table}(id int primary key, {listed})")
    connection.execute(_insert(table), [1, 300])


def _insert(table: str) -> str:
    columns = COLUMNS[table]
    values = ", ".join(_kind(n, columns)[1].format(n=n) for n in range(1, columns))
    return f"insert into {table} select i, {values} from generate_series(%s::int, %s::int) i"


def _kind(number: int, columns: int) -> tuple[str, str]:
    """Columns of a type lie together: between an int and a timestamptz the row would have gaps."""
    return KINDS[number * len(KINDS) // columns]
