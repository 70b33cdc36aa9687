"""Operations on partitions and on membership: rows that come or go, or go unpublished, without a word in the stream."""

from __future__ import annotations

from tests.fuzz.operation import PARTITIONED, PLAIN, THEN, Copies, Operation, Stage

LOOSE = (
    "create table $t__p3(id int primary key, a int, b text);"
    " insert into $t__p3 select i, i, 'p3' from generate_series(2001, 2003) i"
)
ATTACH = "alter table $t attach partition $t__p3 for values from (2000) to (3000)"
ROOT = (Stage.LISTED,)
LEAF_MEMBERS = (Stage.LEAVES,)


def partitions(
    name: str, *steps: str, copies: Copies = Copies.ANY, more: str = "", stages: tuple[Stage, ...] = ROOT
) -> Operation:
    return Operation(name, steps, copies, PARTITIONED + (f"; {more}" if more else ""), stages=stages)


PARTITIONS = (
    partitions("root_truncated", "truncate $t", copies=Copies.NONE),
    partitions("leaf_truncated", "truncate $t__p1", copies=Copies.SOME),
    partitions("leaf_truncated_and_filled", "truncate $t__p1; insert into $t values (3, 33, 'x')", copies=Copies.SOME),
    partitions("leaf_truncated_and_rolled_back", "begin; truncate $t__p1; rollback", copies=Copies.NONE),
    # Leaves the same traces as a TRUNCATE of the leaf, which the stream does not tell: in doubt.
    partitions("leaf_vacuumed_full", "vacuum full $t__p1", copies=Copies.ANY),
    partitions(
        "leaf_commented", "comment on table $t__p1 is 'x'", "grant select on $t__p1 to public", copies=Copies.NONE
    ),
    partitions("leaf_analyzed", "analyze $t", "create index on $t(a)", "reindex table $t__p2", copies=Copies.NONE),
    partitions("leaf_renamed", "alter table $t__p1 rename to $t__p9", copies=Copies.ANY),
    partitions("leaf_moved", "alter table $t__p1 set schema elsewhere"),
    partitions("leaf_made_and_filled", LOOSE + "; " + ATTACH, copies=Copies.SOME),
    partitions("leaf_attached", ATTACH, copies=Copies.SOME, more=LOOSE),
    partitions(
        "leaf_renamed_and_attached",
        "begin; alter table $t__p8 rename to $t__p3; " + ATTACH + "; commit",
        copies=Copies.SOME,
        more=LOOSE.replace("$t__p3", "$t__p8"),
    ),
    partitions(
        "leaf_created_as_partition",
        "create table $t__p3 partition of $t for values from (2000) to (3000)",
        "insert into $t values (2001, 1, 'x')",
        copies=Copies.NONE,
    ),
    partitions(
        "leaf_created_and_filled_at_once",
        "create table $t__p3 partition of $t for values from (2000) to (3000); insert into $t values (2001, 1, 'x')",
        copies=Copies.ANY,
    ),
    partitions("leaf_detached", "alter table $t detach partition $t__p2", copies=Copies.SOME),
    partitions("leaf_detached_concurrently", "alter table $t detach partition $t__p2 concurrently", copies=Copies.SOME),
    partitions("leaf_dropped", "drop table $t__p2", copies=Copies.SOME),
    partitions(
        "leaf_detached_changed_and_attached",
        "alter table $t detach partition $t__p2",
        "delete from $t__p2 where id = 1001; insert into $t__p2 values (1500, 1, 'x')",
        "alter table $t attach partition $t__p2 for values from (1000) to (2000)",
        copies=Copies.SOME,
    ),
    partitions(
        "leaf_split",
        "begin; alter table $t detach partition $t__p2;"
        " create table $t__p2a partition of $t for values from (1000) to (1003);"
        " create table $t__p2b partition of $t for values from (1003) to (2000);"
        " insert into $t select * from $t__p2; drop table $t__p2; commit",
        copies=Copies.ANY,
    ),
    partitions(
        "leaf_replaced",
        "begin; alter table $t detach partition $t__p2; alter table $t__p2 rename to $t__old;"
        " create table $t__p2 (like $t__old including all); insert into $t__p2 values (1999, 9, 'new');"
        " alter table $t attach partition $t__p2 for values from (1000) to (2000); commit",
        copies=Copies.SOME,
    ),
    partitions(
        "subtree_attached",
        "create table $t__p3(id int primary key, a int, b text) partition by range (id);"
        " create table $t__p3x partition of $t__p3 for values from (2000) to (3000);"
        " insert into $t__p3 select i, i, 'p3' from generate_series(2001, 2003) i; " + ATTACH,
        copies=Copies.SOME,
    ),
    partitions(
        "leaf_unlogged_and_logged",
        "alter table $t__p1 set unlogged",
        "insert into $t values (60, 6, 'u'); delete from $t where id = 2",
        "alter table $t__p1 set logged",
        copies=Copies.SOME,
    ),
    partitions("row_moves_across_leaves", "update $t set id = id + 1010 where id = 2", copies=Copies.NONE),
    partitions("root_column_dropped_and_added", "alter table $t drop a, add a int default 7", copies=Copies.SOME),
    partitions("root_column_retyped", "alter table $t alter a type int using a * 100", copies=Copies.SOME),
    partitions("leaf_identity_full", "alter table $t__p1 replica identity full", "update $t set a = 7 where id = 2"),
    partitions(
        "leaf_identity_nothing_and_back",
        "alter table $t__p1 replica identity nothing",
        "insert into $t values (60, 6, 'u')",
        "alter table $t__p1 replica identity default",
        "update $t set a = 7 where id = 60",
    ),
)

_P2 = ("insert into $t(id) values (1100)", "delete from $t where id = 1001")
LEAVES = (
    partitions("members_root_truncated", "truncate $t", copies=Copies.NONE, stages=LEAF_MEMBERS),
    partitions("members_leaf_truncated", "truncate $t__p1", copies=Copies.NONE, stages=LEAF_MEMBERS),
    partitions("member_attached", ATTACH, copies=Copies.SOME, more=LOOSE, stages=LEAF_MEMBERS),
    partitions("member_made_and_filled", LOOSE + "; " + ATTACH, copies=Copies.SOME, stages=LEAF_MEMBERS),
    partitions(
        "member_detached_changed_and_attached",
        "alter table $t detach partition $t__p2",
        "delete from $t__p2 where id = 1002; insert into $t__p2 values (1500, 1, 'x')",
        "alter table $t attach partition $t__p2 for values from (1000) to (2000)",
        copies=Copies.SOME,
        stages=LEAF_MEMBERS,
    ),
    partitions("member_renamed", "alter table $t__p1 rename to $t__p9", copies=Copies.SOME, stages=LEAF_MEMBERS),
    partitions(
        "members_swapped",
        "alter table $t__p1 rename to $t__x; alter table $t__p2 rename to $t__p1; alter table $t__x rename to $t__p2",
        copies=Copies.SOME,
        stages=LEAF_MEMBERS,
    ),
)

LISTED = (
    Operation(
        "left_and_came_back",
        (
            "alter publication shop drop table $t",
            "insert into $t values (50, 5, 'x'); delete from $t where id = 2",
            "alter publication shop add table $t",
        ),
        Copies.SOME,
    ),
    Operation(
        "left_and_came_back_at_once",
        (
            "alter publication shop drop table $t; insert into $t values (50, 5, 'x'); delete from $t where id = 2;"
            " alter publication shop add table $t",
        ),
    ),
    Operation(
        "columns_listed_and_restored",
        (
            "alter publication shop drop table $t; alter publication shop add table $t (id, a)",
            "update $t set b = 'unseen' where id = 2; insert into $t values (50, 5, 'unseen')",
            "alter publication shop drop table $t; alter publication shop add table $t",
        ),
        Copies.SOME,
    ),
    Operation(
        "columns_listed",
        ("alter publication shop drop table $t; alter publication shop add table $t (id, a)",),
        Copies.SOME,
    ),
    Operation(
        "rows_filtered_and_restored",
        (
            "alter publication shop drop table $t; alter publication shop add table $t where (id > 3)",
            "delete from $t where id = 2; insert into $t values (0, 5, 'unseen')",
            "alter publication shop drop table $t; alter publication shop add table $t",
        ),
        Copies.SOME,
    ),
    Operation(
        "rows_filtered",
        ("alter publication shop drop table $t; alter publication shop add table $t where (id > 3)",),
        Copies.SOME,
        then=("insert into $t(id) values (100)", "delete from $t where id = 4", "delete from $t where id = 1"),
    ),
)

EVERYWHERE = (
    Operation(
        "unlogged_and_logged",
        ("alter table $t set unlogged", "insert into $t values (50, 5, 'x')", "alter table $t set logged"),
        Copies.SOME,
        stages=(Stage.ALL, Stage.SCHEMA),
    ),
    Operation(
        "out_of_the_schema_and_back",
        (
            "alter table $t set schema elsewhere",
            "insert into elsewhere.$t values (50, 5, 'x'); delete from elsewhere.$t where id = 2",
            "alter table elsewhere.$t set schema public",
        ),
        Copies.SOME,
        stages=(Stage.SCHEMA,),
    ),
    Operation(
        "out_of_the_schema_and_back_at_once",
        (
            "begin; alter table $t set schema elsewhere; insert into elsewhere.$t values (50, 5, 'x');"
            " alter table elsewhere.$t set schema public; commit",
        ),
        stages=(Stage.SCHEMA,),
    ),
    Operation(
        "made_by_a_query_and_renamed",
        (
            "create table $t__new as select id, a * 10 as a, 'new' as b from $t; alter table $t__new add primary key (id)",
            "begin; drop table $t; alter table $t__new rename to $t; commit",
        ),
        Copies.SOME,
        stages=(Stage.ALL, Stage.SCHEMA),
    ),
    Operation("made_and_dropped", ("create table $t__x(id int primary key)", "drop table $t__x"), stages=(Stage.ALL,)),
    Operation(
        "made_and_filled",
        ("create table $t__x(id int primary key); insert into $t__x values (1)", "insert into $t__x values (2)"),
        Copies.SOME,
        then=(*THEN, "insert into $t__x values (3)"),
        stages=(Stage.ALL, Stage.SCHEMA),
    ),
    Operation(
        "truncated_of_all", ("truncate $t", "insert into $t values (9, 9, 'x')"), Copies.NONE, stages=(Stage.ALL,)
    ),
    Operation(
        "granted_of_all", ("grant select on $t to public", "analyze $t"), Copies.NONE, stages=(Stage.ALL, Stage.SCHEMA)
    ),
    Operation(
        "leaf_attached_of_all",
        (ATTACH,),
        Copies.SOME,
        PARTITIONED + "; " + LOOSE,
        stages=(Stage.ALL, Stage.SCHEMA),
    ),
    Operation(
        "leaf_detached_of_all",
        ("alter table $t detach partition $t__p2", "insert into $t__p2 values (1500, 1, 'x')"),
        Copies.SOME,
        PARTITIONED,
        stages=(Stage.ALL, Stage.SCHEMA),
    ),
)

OPERATIONS = (*PARTITIONS, *LEAVES, *LISTED, *EVERYWHERE)

_TWO = PLAIN.replace("$t", "plain") + "; " + PARTITIONED.replace("$t", "parted")
_ROWS = (
    "insert into plain values (50, 5, 'x'); delete from plain where id = 2; update plain set a = 9 where id = 3;"
    " insert into parted values (50, 5, 'x'); delete from parted where id = 2; update parted set a = 9 where id = 1003"
)


def _publication(name: str, *steps: str, copies: Copies = Copies.ANY) -> Operation:
    """On the publication itself: a pipeline of its own, over a plain and a partitioned table."""
    then = ("insert into plain(id) values (100)", "delete from parted where id = 1")
    return Operation(name, steps, copies, _TWO, then, ("plain", "parted"), alone=True)


VIA_ROOT = "publish_via_partition_root"
PUBLICATIONS = (
    _publication("owner", "alter publication shop owner to pg_monitor", copies=Copies.NONE),
    _publication(
        "comment",
        "comment on publication shop is 'words'",
        "create publication other for all tables",
        copies=Copies.NONE,
    ),
    _publication("same_tables_set", "alter publication shop set table plain, parted", _ROWS, copies=Copies.NONE),
    _publication(
        "renamed_and_back",
        "alter publication shop rename to away",
        _ROWS,
        "alter publication away rename to shop",
        copies=Copies.SOME,
    ),
    _publication(
        "renamed_and_back_behind_its_owner",
        "alter publication shop rename to away",
        _ROWS,
        "alter publication away rename to shop",
        "alter publication shop owner to pg_monitor",
        copies=Copies.SOME,
    ),
    _publication(
        "narrowed_and_restored_behind_its_owner",
        "alter publication shop owner to pg_monitor",
        "alter publication shop set (publish = 'insert')",
        _ROWS,
        "alter publication shop set (publish = 'insert, update, delete, truncate')",
        copies=Copies.SOME,
    ),
    _publication(
        "narrowed_and_restored",
        "alter publication shop set (publish = 'insert')",
        _ROWS,
        "alter publication shop set (publish = 'insert, update, delete, truncate')",
        copies=Copies.SOME,
    ),
    _publication(
        "via_root_off_and_on",
        f"alter publication shop set ({VIA_ROOT} = false)",
        _ROWS,
        f"alter publication shop set ({VIA_ROOT} = true)",
    ),
    _publication("via_root_off", f"alter publication shop set ({VIA_ROOT} = false)", _ROWS),
    _publication(
        "dropped_and_made_again",
        "drop publication shop",
        _ROWS,
        f"create publication shop for table plain, parted with ({VIA_ROOT} = true)",
        copies=Copies.SOME,
    ),
    _publication(
        "dropped_and_made_again_at_once",
        f"begin; drop publication shop; create publication shop for table plain, parted with ({VIA_ROOT} = true); commit",
        _ROWS,
    ),
    _publication(
        "generated_columns_off_and_on",
        "alter publication shop set (publish_generated_columns = none)",
        _ROWS,
        "alter publication shop set (publish_generated_columns = stored)",
    ),
)
