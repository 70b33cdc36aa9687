"""What changes rows in silence, beside something harmless or something that the stream tells, which leaves the same traces.

Among them: what was another for a while and is the same again, with rows written meanwhile.
"""

from __future__ import annotations

from tests.fuzz.membership_operations import ATTACH, LOOSE, partitions
from tests.fuzz.operation import Copies, Operation, Stage
from tests.fuzz.table_operations import ENUM, FULL, GENERATED, NARROW

_RETYPE = "alter table $t alter a type int using a * 100"

TABLES = (
    Operation("retyped_after_a_truncate", ("truncate $t; insert into $t values (7, 7, 'x')", _RETYPE), Copies.SOME),
    Operation(
        "retyped_after_a_truncate_without_toast",
        ("truncate $t; insert into $t values (7, 7)", _RETYPE),
        Copies.SOME,
        NARROW,
    ),
    Operation("retyped_before_a_truncate", (_RETYPE, "truncate $t; insert into $t values (7, 7, 'x')")),
    Operation("retyped_and_vacuumed_full", (_RETYPE, "vacuum full $t"), Copies.SOME),
    Operation("retyped_and_granted", (_RETYPE, "grant select (a) on $t to public", "analyze $t"), Copies.SOME),
    Operation("retyped_beside_a_rolled_back_truncate", ("begin; truncate $t; rollback", _RETYPE), Copies.SOME),
    Operation(
        "column_dropped_and_added_and_granted",
        ("alter table $t drop a, add a int default 7", "grant select (a) on $t to public", "vacuum full $t"),
        Copies.SOME,
    ),
    Operation(
        "enum_value_renamed_and_another_added",
        ("alter type $t_mood rename value 'sad' to 'blue'", "alter type $t_mood add value 'sad'"),
        Copies.SOME,
        ENUM,
    ),
    Operation(
        "key_made_again_under_full_and_reindexed",
        (
            "alter table $t drop constraint $t_pkey",
            "insert into $t values (2, 20, 'twice'); delete from $t where b = 'twice'; update $t set a = 7 where id = 3",
            "alter table $t add primary key (id)",
            "reindex table concurrently $t",
        ),
        before=FULL,
    ),
    Operation(
        "moved_and_back_and_granted",
        (
            "alter table $t set schema elsewhere",
            "insert into elsewhere.$t values (50, 5, 'x')",
            "alter table elsewhere.$t set schema public",
            "grant select on $t to public",
        ),
    ),
    Operation(
        "expression_set_and_granted",
        ("alter table $t alter g set expression as (a * 3)", "grant select (g) on $t to public"),
        Copies.SOME,
        GENERATED,
    ),
    Operation(
        "enum_value_renamed_and_back",
        (
            "alter type $t_mood rename value 'sad' to 'blue'",
            "insert into $t values (50, 'blue', '{blue}'); update $t set mood = 'blue' where id = 3",
            "alter type $t_mood rename value 'blue' to 'sad'",
        ),
        Copies.SOME,
        ENUM,
    ),
    Operation(
        "enum_value_under_a_domain_renamed_and_back_at_once",
        (
            "begin; alter type $t_mood rename value 'sad' to 'blue'; insert into $t values (50, 'blue');"
            " alter type $t_mood rename value 'blue' to 'sad'; commit",
        ),
        Copies.SOME,
        "create type $t_mood as enum ('sad', 'glad'); create domain $t_d as $t_mood;"
        " create table $t(id int primary key, mood $t_d); insert into $t select i, 'sad' from generate_series(1, 5) i",
    ),
    Operation(
        "retyped_beside_a_column_that_came_and_went",
        ("alter table $t add c text", _RETYPE, "alter table $t drop c"),
        Copies.SOME,
        NARROW,
    ),
    Operation(
        "truncated_and_retyped_at_once_without_toast",
        (f"begin; truncate $t; insert into $t values (7, 7); {_RETYPE}; commit",),
        Copies.SOME,
        NARROW,
    ),
    Operation(
        "truncated_and_retyped_at_once",
        (f"begin; truncate $t; insert into $t values (7, 7, 'x'); {_RETYPE}; commit",),
        Copies.SOME,
    ),
    Operation(
        "filled_and_unlogged_for_a_while_without_toast",
        (
            "alter table $t set unlogged",
            "insert into $t values (8, 8); delete from $t where id = 2",
            "alter table $t set logged",
        ),
        Copies.SOME,
        NARROW,
        stages=(Stage.ALL, Stage.SCHEMA),
    ),
    Operation(
        "retyped_and_vacuumed_full_without_toast",
        (_RETYPE, "alter table $t set (fillfactor = 80)", "vacuum full $t", "analyze $t"),
        Copies.SOME,
        NARROW,
    ),
    Operation(
        "truncated_and_retyped_under_a_savepoint_without_toast",
        (
            "begin; truncate $t; insert into $t values (7, 7); savepoint s; "
            + _RETYPE
            + "; release s; alter table $t set (fillfactor = 80); commit",
        ),
        Copies.SOME,
        NARROW,
    ),
    Operation(
        "row_type_altered",
        ("alter table $t__inner add y int",),
        Copies.SOME,
        "create table $t__inner(x int primary key, m text); create table $t(id int primary key, c $t__inner);"
        " insert into $t select i, row(i, 'm')::$t__inner from generate_series(1, 5) i",
    ),
    Operation(
        "identity_index_swapped_under_its_name",
        (
            "begin; alter table $t replica identity full; drop index $t_u; create unique index $t_u on $t(a);"
            " alter table $t replica identity using index $t_u; commit",
            "update $t set id = 70 where a = 2; delete from $t where a = 3",
        ),
        before="create table $t(id int primary key, a int not null, b text not null);"
        " insert into $t select i, i, 'b' || i from generate_series(1, 5) i;"
        " create unique index $t_u on $t(b); alter table $t replica identity using index $t_u",
        then=("insert into $t values (100, 100, 'z')", "update $t set b = 'q' where a = 4"),
    ),
)

MEMBERS = (
    partitions(
        "leaf_truncated_after_the_root",
        "truncate $t; insert into $t select i, i, 'x' from generate_series(1, 5) i",
        "truncate $t__p1",
        copies=Copies.SOME,
    ),
    partitions("leaf_truncated_before_the_root", "truncate $t__p1", "truncate $t", "insert into $t values (7, 7, 'x')"),
    partitions(
        "leaf_made_and_filled_beside_an_empty_one",
        "create table $t__p4 partition of $t for values from (3000) to (4000)",
        LOOSE + "; " + ATTACH,
        copies=Copies.SOME,
    ),
    Operation(
        "out_of_the_schema_and_back_behind_its_owner",
        (
            "alter table $t owner to pg_monitor",
            "alter table $t set schema elsewhere",
            "insert into elsewhere.$t values (50, 5, 'x'); delete from elsewhere.$t where id = 2",
            "alter table elsewhere.$t set schema public",
        ),
        Copies.SOME,
        stages=(Stage.SCHEMA,),
    ),
    Operation(
        "left_and_came_back_behind_another",
        (
            "alter publication shop drop table $t",
            "insert into $t values (50, 5, 'x'); delete from $t where id = 2",
            "create table $t__x(id int primary key); alter publication shop add table $t, $t__x",
            "grant select on $t to public",
        ),
        Copies.SOME,
    ),
    Operation(
        "unlogged_and_logged_before_a_truncate",
        (
            "alter table $t set unlogged",
            "insert into $t values (50, 5, 'x')",
            "alter table $t set logged",
            "truncate $t; insert into $t values (9, 9, 'x')",
        ),
        stages=(Stage.ALL,),
    ),
    Operation(
        "unlogged_and_logged_after_a_truncate",
        (
            "truncate $t; insert into $t values (9, 9, 'x')",
            "alter table $t set unlogged",
            "insert into $t values (50, 5, 'x')",
            "alter table $t set logged",
        ),
        Copies.SOME,
        stages=(Stage.ALL,),
    ),
    partitions(
        "all_leaves_truncated_after_the_root",
        "truncate $t; insert into $t values (7, 7, 'x'), (1007, 7, 'x')",
        "truncate $t__p1, $t__p2",
        copies=Copies.SOME,
    ),
    partitions(
        "leaf_truncated_after_the_root_and_all_granted",
        "truncate $t; insert into $t values (7, 7, 'x'), (1007, 7, 'x')",
        "truncate $t__p1",
        "grant select on $t__p1, $t__p2 to public",
        copies=Copies.SOME,
    ),
    partitions(
        "leaf_made_and_filled_beside_a_rolled_back_grant",
        f"begin; {LOOSE}; {ATTACH}; commit",
        "begin; grant select (a) on $t__p3 to public; rollback",
        copies=Copies.SOME,
    ),
    partitions(
        "leaf_made_filled_and_dropped",
        "create table $t__p3 partition of $t for values from (2000) to (3000)",
        "insert into $t values (2001, 1, 'x')",
        "drop table $t__p3",
    ),
    partitions(
        "leaf_made_filled_and_dropped_beside_a_new_one",
        "create table $t__p3 partition of $t for values from (2000) to (3000)",
        "insert into $t values (2001, 1, 'x')",
        "drop table $t__p3",
        "create table $t__p4 partition of $t for values from (4000) to (5000)",
    ),
    partitions(
        "leaf_detached_filled_and_attached_at_once",
        "begin; alter table $t detach partition $t__p2; insert into $t__p2 values (1500, 1, 'x');"
        " alter table $t attach partition $t__p2 for values from (1000) to (2000); commit",
        copies=Copies.SOME,
    ),
    partitions(
        "leaf_retyped_by_its_root_at_once_with_a_truncate",
        f"begin; truncate $t; insert into $t values (7, 7, 'x'); {_RETYPE}; commit",
        copies=Copies.SOME,
    ),
    partitions(
        "root_moved_and_back",
        "alter table $t set schema elsewhere",
        "insert into elsewhere.$t values (50, 5, 'x'); delete from elsewhere.$t where id = 2",
        "alter table elsewhere.$t set schema public",
        copies=Copies.SOME,
        stages=(Stage.SCHEMA,),
    ),
    partitions(
        "root_moved_and_back_with_its_leaves_elsewhere",
        "alter table $t set schema elsewhere",
        "insert into elsewhere.$t values (50, 5, 'x'); delete from elsewhere.$t where id = 2",
        "alter table elsewhere.$t set schema public",
        copies=Copies.SOME,
        more="alter table $t__p1 set schema elsewhere; alter table $t__p2 set schema elsewhere",
        stages=(Stage.SCHEMA,),
    ),
    partitions(
        "leaf_moved_and_back",
        "alter table $t__p1 set schema elsewhere",
        "insert into $t values (50, 5, 'x'); delete from $t where id = 2",
        "alter table elsewhere.$t__p1 set schema public",
        stages=(Stage.SCHEMA, Stage.ALL),
    ),
)

OPERATIONS = (*TABLES, *MEMBERS)
