"""Small tables read over one session: what each is made of, what does not fit, and what goes wrong with one of them."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from headwater.errors import ValueOutOfRange
from headwater.source.copy_plan import SmallTable
from headwater.source.copy_small import SmallRead, read_small_tables
from headwater.source.exported_snapshot import exported_snapshot
from headwater.spark.small_tables import HeldRows, deal
from tests.conftest import Database


def read(database: Database, *names: str, budget_bytes: int = 1 << 20) -> dict[str, SmallRead]:
    with exported_snapshot(database.settings, "shop") as snapshot:
        tables = []
        for name in names:
            found = snapshot.tables[f"public.{name}"]
            tables.append(SmallTable(found.plan.table_id, snapshot.origin(f"public.{name}"), found.plan.ranges))
        reads = list(read_small_tables(pickle.loads(pickle.dumps(tables)), budget_bytes))
    assert [one.id for one in reads] == [table.id for table in tables]
    return dict(zip(names, reads, strict=True))


def rows(one: SmallRead) -> list[tuple[object, ...]]:
    assert one.rows is not None
    held = HeldRows(one.rows.to_pybytes())
    found = [row for batch in held.batches() for row in zip(*(c.to_pylist() for c in batch.columns), strict=True)]
    assert held.count == len(found)
    return found


def test_every_table_has_an_outcome_of_its_own(database: Database) -> None:
    database.execute(
        """
        create table a(id int primary key, note text); insert into a values (1, 'x'), (2, null);
        create table bad(id int primary key, day date); insert into bad values (1, 'infinity');
        create table nothing(id int primary key);
        create table c(id int primary key, many int[]); insert into c values (7, '{1,null}');
        create publication shop for all tables
        """
    )
    found = read(database, "a", "bad", "nothing", "c")
    assert rows(found["a"]) == [(1, "x"), (2, None)]
    assert isinstance(found["bad"].error, ValueOutOfRange)
    assert found["bad"].rows is None
    assert rows(found["nothing"]) == []
    assert rows(found["c"]) == [(7, [1, None])]


@pytest.mark.promise("small tables share slot, exported snapshot and job, and each has a state and an error of its own")
def test_what_does_not_fit_is_left_out_and_the_budget_holds(database: Database) -> None:
    database.execute(
        """
        create table a(id int primary key); insert into a select generate_series(1, 100);
        create table toasted(id int primary key, note text); insert into toasted values (1, repeat('x', 5000000));
        create table c(id int primary key); insert into c select generate_series(1, 100);
        create publication shop for all tables
        """
    )
    found = read(database, "a", "toasted", "c")
    # Its heap is a page and its TOAST, compressed, a few: only reading it shows how large it is.
    assert found["toasted"] == SmallRead(found["toasted"].id)
    assert rows(found["a"]) == rows(found["c"]) == [(number,) for number in range(1, 101)]
    assert sum(one.rows.size for one in found.values() if one.rows is not None) < 1 << 20
    (a,) = read(database, "a").values()
    short = read(database, "a", "c", budget_bytes=a.rows.size)
    assert (short["a"].rows, short["c"].rows) == (a.rows, None)
    assert isinstance(a.rows, pa.Buffer)


def test_tables_are_dealt_out_evenly(database: Database) -> None:
    database.execute("create table a(id int primary key); create publication shop for all tables")
    with exported_snapshot(database.settings, "shop") as snapshot:
        one = SmallTable(snapshot.tables["public.a"].plan.table_id, snapshot.origin("public.a"), ())
    assert [len(task) for task in deal([one] * 7, 3)] == [3, 2, 2]
    assert deal([], 3) == []
