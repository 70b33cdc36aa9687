"""Nested partitions in a whole pipeline: by the root, by the leaves, and a single leaf alone."""

from __future__ import annotations

import pytest

from tests.conftest import Database
from tests.integration.running_pipeline import running

# Columns in another order in one leaf: what is read and sent goes by name, not by position.
NESTED = """
create table m(id int, at int, region text, note text, primary key (id, at, region)) partition by range (at);
create table m1 partition of m for values from (0) to (10);
create table m2 partition of m for values from (10) to (20) partition by list (region);
create table m2_north partition of m2 for values in ('north') partition by hash (id);
create table m2_north_0 partition of m2_north for values with (modulus 2, remainder 0);
create table m2_north_1(id int not null, note text, region text not null, at int not null);
alter table m2_north_1 add primary key (id, at, region);
alter table m2_north attach partition m2_north_1 for values with (modulus 2, remainder 1);
create table m2_rest partition of m2 default;
insert into m select i, i % 20, case i % 3 when 0 then 'north' when 1 then 'south' else '' end, 'n' || i
    from generate_series(1, 600) i;
"""
LEAVES = ("m1", "m2_north_0", "m2_north_1", "m2_rest")

CHANGES = """
insert into m values (1001, 15, 'north', 'new'), (1002, 3, 'north', 'new'), (1003, 19, 'far', 'new');
update m set note = 'changed' where id % 10 = 0;
-- Rows that move: to another leaf of the same branch, and to another branch.
update m set region = 'south' where region = 'north' and at >= 10 and id % 4 = 0;
update m set at = at - 10 where at >= 10 and id % 5 = 0;
delete from m where id between 100 and 150;
begin; truncate m2_north_0; insert into m values (2000, 11, 'north', 'after'), (2001, 11, 'north', 'after'); commit;
"""


@pytest.mark.promise(
    "partitioned roots, nested partitions and single leaves, with and without publish_via_partition_root"
)
@pytest.mark.parametrize("via_root", [True, False])
def test_nested_partitions_are_copied_and_followed_by_the_root_or_by_the_leaves(
    database: Database, via_root: bool
) -> None:
    database.execute(NESTED)
    database.execute(f"create publication shop for table m with (publish_via_partition_root = {via_root})")
    tables = ("m",) if via_root else LEAVES
    with running(database) as run:
        run.wait_for(lambda: run.states() == {f"public.{table}": "ready" for table in tables})
        run.assert_equal(*tables)
        # A leaf's truncate is not published by the root: what the source lost, the mirror of the root keeps.
        changes = CHANGES if not via_root else CHANGES.replace("truncate m2_north_0", "delete from m2_north_0")
        database.execute(changes)
        run.wait_caught_up()
        run.assert_equal(*tables)
        assert sorted(run.destination.copies) == sorted(tables)


@pytest.mark.promise(
    "partitioned roots, nested partitions and single leaves, with and without publish_via_partition_root"
)
@pytest.mark.parametrize("via_root", [True, False])
def test_a_single_leaf_of_nested_partitions_is_copied_and_followed_alone(database: Database, via_root: bool) -> None:
    database.execute(NESTED)
    database.execute(f"create publication shop for table m2_north_1 with (publish_via_partition_root = {via_root})")
    with running(database) as run:
        run.wait_for(lambda: run.states() == {"public.m2_north_1": "ready"})
        database.execute(CHANGES)
        database.execute("update m2_north_1 set note = 'by its own name' where id % 7 = 0")
        run.wait_caught_up()
        run.assert_equal("m2_north_1")
        assert len(run.destination.tables["m2_north_1"]) > 10
        assert set(run.destination.tables) == {"m2_north_1"}


@pytest.mark.versions(14, 15, 18)
@pytest.mark.parametrize("publication", ["for table t", "for all tables"])
def test_a_partition_that_is_attached_or_detached_is_followed_as_what_it_is_from_then_on(
    database: Database, publication: str
) -> None:
    """Postgres 14 goes on to send its changes as what it was when the stream began."""
    database.execute(
        f"""
        create table t(id int primary key, a int) partition by range (id);
        create table t1 partition of t for values from (0) to (1000);
        create table t2 partition of t for values from (1000) to (2000);
        create table t3(id int primary key, a int);
        insert into t values (1, 1), (1001, 1); insert into t3 values (2001, 1), (2002, 1);
        create publication shop {publication} with (publish_via_partition_root = true);
        """
    )
    with running(database) as run:
        run.wait_for(lambda: set(run.states().values()) == {"ready"} and "public.t" in run.states())
        database.execute("insert into t values (1500, 1); insert into t3 values (2500, 1)")
        run.wait_caught_up()
        database.execute("alter table t attach partition t3 for values from (2000) to (3000)")
        run.wait_for(lambda: run.destination.copies.count("t") == 2)
        run.wait_for(lambda: run.states() == {"public.t": "ready"})
        database.execute(
            "insert into t values (2700, 1); delete from t where id = 2002; update t set a = 7 where id = 2001"
        )
        run.wait_caught_up()
        run.assert_equal("t")
        database.execute("alter table t detach partition t2")
        run.wait_for(lambda: run.destination.copies.count("t") == 3)
        run.wait_for(lambda: set(run.states().values()) == {"ready"})
        database.execute("insert into t2 values (1600, 1); delete from t2 where id = 1001; insert into t values (5, 5)")
        run.wait_caught_up()
        run.assert_equal("t", *(["t2"] if "all" in publication else []))
