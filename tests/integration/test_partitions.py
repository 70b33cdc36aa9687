"""Nested partitions in a whole pipeline: by the root, by the leaves, and a single leaf alone."""

from __future__ import annotations

import pytest

from tests.conftest import Database
from tests.integration.mirror import running

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
        assert sorted(run.mirror.copies) == sorted(tables)


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
        assert len(run.mirror.tables["m2_north_1"]) > 10
        assert set(run.mirror.tables) == {"m2_north_1"}
