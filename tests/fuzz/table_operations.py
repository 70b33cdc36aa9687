"""Operations on plain tables: those that change nothing of the rows, and those that change them without a row event."""

from __future__ import annotations

from tests.fuzz.operation import PLAIN, Copies, Operation, Stage

NARROW = "create table $t(id int primary key, a int); insert into $t select i, i from generate_series(1, 5) i"
"""Without a TOAST relation: a rewrite and a VACUUM FULL leave the same traces."""
FULL = PLAIN + "; alter table $t replica identity full"
ENUM = (
    "create type $t_mood as enum ('sad', 'glad'); create table $t(id int primary key, mood $t_mood, moods $t_mood[]);"
    " insert into $t select i, 'sad', '{sad,glad}' from generate_series(1, 5) i"
)
GENERATED = (
    "create table $t(id int primary key, a int, g int generated always as (a * 2) stored);"
    " insert into $t select i, i from generate_series(1, 5) i"
)


def _harmless(name: str, *steps: str, before: str = PLAIN) -> Operation:
    return Operation(name, steps, Copies.NONE, before)


HARMLESS = (
    _harmless("grant_on_a_table", "grant select on $t to public"),
    _harmless("grant_on_a_column", "grant select (a) on $t to public", "revoke select (a) on $t from public"),
    _harmless("owner_changed", "alter table $t owner to pg_monitor"),
    _harmless("commented", "comment on table $t is 'words'", "comment on column $t.a is 'more'"),
    _harmless("analyzed", "analyze $t"),
    _harmless("vacuumed", "vacuum $t", "vacuum (freeze, analyze) $t"),
    _harmless("indexed", "create index on $t(a)", "create unique index $t_b on $t(b)", "drop index $t_b"),
    _harmless("indexed_concurrently", "create index concurrently on $t(a)"),
    _harmless("reindexed", "reindex table $t"),
    _harmless("reindexed_concurrently", "reindex table concurrently $t"),
    _harmless("statistics_set", "alter table $t alter a set statistics 500", "create statistics $t_s on a, b from $t"),
    _harmless("storage_set", "alter table $t alter b set storage external"),
    _harmless("compression_set", "alter table $t alter b set compression pglz"),
    _harmless("column_options_set", "alter table $t alter a set (n_distinct = 5)"),
    _harmless("table_options_set", "alter table $t set (fillfactor = 50, autovacuum_enabled = false)"),
    _harmless(
        "trigger_made",
        "create function $t_f() returns trigger language plpgsql as 'begin return new; end'",
        "create trigger $t_t before insert on $t for each row execute function $t_f()",
        "alter table $t disable trigger $t_t",
    ),
    _harmless("row_security_enabled", "alter table $t enable row level security", "create policy p on $t using (true)"),
    _harmless("rule_made", "create rule $t_r as on update to $t where false do instead nothing"),
    _harmless("default_set", "alter table $t alter a set default 5", "alter table $t alter a drop default"),
    _harmless(
        "constraints_added",
        "alter table $t add check (a < 1000000) not valid",
        "alter table $t add foreign key (a) references $t(id) not valid",
        "alter table $t add constraint $t_u unique (b)",
    ),
    _harmless("key_constraint_renamed", "alter table $t rename constraint $t_pkey to $t_k"),
    _harmless("vacuumed_full_with_toast", "vacuum full $t"),
    _harmless("clustered_with_toast", "cluster $t using $t_pkey"),
    _harmless("truncated", "truncate $t"),
    _harmless("truncated_and_filled", "truncate $t; insert into $t values (7, 7, 'x')"),
    _harmless("truncated_without_toast", "truncate $t restart identity", before=NARROW),
    _harmless("truncated_in_a_rolled_back_savepoint", "begin; savepoint s; truncate $t; rollback to s; commit"),
    _harmless("truncated_and_rolled_back", "begin; truncate $t; rollback"),
    _harmless("locked", "begin; lock table $t; commit"),
    _harmless(
        "altered_and_rolled_back", "begin; alter table $t add c int; alter table $t alter a type bigint; rollback"
    ),
    _harmless("renamed_and_rolled_back", "begin; alter table $t rename to $t__other; rollback"),
    _harmless(
        "written_as_a_replica",
        "set session_replication_role = replica; insert into $t values (50, 1, 'r'); delete from $t where id = 3;"
        " reset session_replication_role",
    ),
    _harmless(
        "merged_into",
        "merge into $t using (values (1, 10), (60, 60)) s(id, a) on s.id = $t.id"
        " when matched then update set a = s.a when not matched then insert values (s.id, s.a, 'm')",
    ),
    Operation(
        "virtual_expression_set",
        ("alter table $t alter v set expression as (a * 3)",),
        Copies.NONE,
        "create table $t(id int primary key, a int, v int generated always as (a * 2) virtual);"
        " insert into $t select i, i from generate_series(1, 5) i",
        # The server refuses it for a table that is listed by name.
        stages=(Stage.ALL, Stage.SCHEMA),
    ),
    Operation(
        "domain_constrained",
        ("alter domain $t_d set default 5", "alter domain $t_d add check (value < 1000)"),
        Copies.NONE,
        "create domain $t_d as int; create table $t(id int primary key, d $t_d);"
        " insert into $t select i, i from generate_series(1, 5) i",
    ),
    Operation(
        "viewed",
        ("create view $t_v as select a from $t", "create table $t_like (like $t)", "drop table $t_like"),
        Copies.NONE,
    ),
)

REWRITES = (
    Operation("vacuumed_full_without_toast", ("vacuum full $t",), before=NARROW),
    Operation("clustered_without_toast", ("cluster $t using $t_pkey",), before=NARROW),
    Operation("truncated_in_a_savepoint", ("begin; savepoint s; truncate $t; release s; commit",)),
    Operation("not_null_set", ("alter table $t alter a set not null", "alter table $t alter a drop not null")),
    Operation(
        "column_dropped_and_added_at_once",
        ("alter table $t drop column a, add column a int default 7",),
        Copies.SOME,
    ),
    Operation(
        "column_dropped_and_added",
        ("alter table $t drop column a", "alter table $t add column a int default 7"),
        Copies.SOME,
    ),
    Operation(
        "last_column_dropped_and_added",
        ("alter table $t drop column a", "alter table $t add column a int default 7"),
        Copies.SOME,
        NARROW,
    ),
    Operation("column_retyped_to_itself", ("alter table $t alter a type int using a * 100",), Copies.SOME),
    Operation(
        "column_retyped_to_itself_without_toast",
        ("alter table $t alter a type int using a * 100",),
        Copies.SOME,
        NARROW,
    ),
    Operation("column_widened", ("alter table $t alter a type bigint",)),
    Operation(
        "column_widened_and_back", ("alter table $t alter a type bigint", "alter table $t alter a type int using a * 7")
    ),
    Operation("text_to_varchar_and_back", ("alter table $t alter b type varchar", "alter table $t alter b type text")),
    Operation("column_added_with_constant", ("alter table $t add c int default 5",), Copies.SOME),
    Operation("column_added_with_volatile", ("alter table $t add c int default (random() * 100)::int",), Copies.SOME),
    Operation("column_added_as_identity", ("alter table $t add c int generated always as identity",), Copies.SOME),
    Operation("column_added_generated", ("alter table $t add c int generated always as (a + 1) stored",), Copies.SOME),
    Operation("column_added_and_dropped", ("begin; alter table $t add c int; alter table $t drop c; commit",)),
    Operation("column_dropped", ("alter table $t drop a",), Copies.SOME),
    Operation("column_renamed", ("alter table $t rename a to z",), Copies.SOME),
    Operation("column_renamed_and_back", ("alter table $t rename a to z", "alter table $t rename z to a")),
    Operation(
        "columns_swap_names",
        ("begin; alter table $t rename b to x; alter table $t rename c to b; alter table $t rename x to c; commit",),
        Copies.SOME,
        "create table $t(id int primary key, b text, c text); insert into $t select i, 'b', 'c' from generate_series(1, 5) i",
    ),
    Operation("enum_value_renamed", ("alter type $t_mood rename value 'sad' to 'blue'",), Copies.SOME, ENUM),
    Operation(
        "enum_values_swapped",
        (
            "alter type $t_mood rename value 'sad' to 'x'; alter type $t_mood rename value 'glad' to 'sad';"
            " alter type $t_mood rename value 'x' to 'glad'",
        ),
        Copies.SOME,
        ENUM,
    ),
    Operation(
        "enum_value_added",
        ("alter type $t_mood add value 'bored' before 'glad'", "insert into $t values (50, 'bored', '{bored}')"),
        Copies.ANY,
        ENUM,
    ),
    Operation("enum_type_renamed", ("alter type $t_mood rename to $t_spirit",), Copies.ANY, ENUM),
    Operation(
        "enum_value_under_a_domain_renamed",
        ("alter type $t_mood rename value 'sad' to 'blue'",),
        Copies.SOME,
        "create type $t_mood as enum ('sad', 'glad'); create domain $t_d as $t_mood;"
        " create table $t(id int primary key, mood $t_d); insert into $t select i, 'sad' from generate_series(1, 5) i",
    ),
    Operation(
        "enum_value_in_a_composite_renamed",
        ("alter type $t_mood rename value 'sad' to 'blue'",),
        Copies.SOME,
        "create type $t_mood as enum ('sad', 'glad'); create type $t_c as (m $t_mood, n int);"
        " create table $t(id int primary key, c $t_c);"
        " insert into $t select i, row('sad', i)::text::$t_c from generate_series(1, 5) i",
    ),
    Operation(
        "composite_attribute_added",
        ("alter type $t_c add attribute o int",),
        Copies.SOME,
        "create type $t_c as (m text, n int); create table $t(id int primary key, c $t_c);"
        " insert into $t select i, row('m', i)::text::$t_c from generate_series(1, 5) i",
    ),
    Operation(
        "composite_attribute_dropped",
        ("alter type $t_c drop attribute n",),
        Copies.SOME,
        "create type $t_c as (m text, n int); create table $t(id int primary key, c $t_c);"
        " insert into $t select i, row('m', i)::text::$t_c from generate_series(1, 5) i",
    ),
    Operation("expression_set", ("alter table $t alter g set expression as (a * 3)",), Copies.SOME, GENERATED),
    Operation("expression_dropped", ("alter table $t alter g drop expression",), Copies.ANY, GENERATED),
    Operation(
        "expression_dropped_and_rows_changed",
        ("alter table $t alter g drop expression", "update $t set g = 1 where id = 2"),
        Copies.ANY,
        GENERATED,
    ),
)

IDENTITIES = (
    Operation(
        "identity_full_and_back",
        (
            "alter table $t replica identity full",
            "update $t set a = 9 where id = 2; delete from $t where id = 3",
            "alter table $t replica identity default",
            "update $t set a = 8 where id = 4",
        ),
    ),
    Operation(
        "identity_nothing_and_back",
        (
            "alter table $t replica identity nothing",
            "insert into $t values (50, 5, 'x')",
            "alter table $t replica identity default",
            "update $t set a = 8 where id = 50",
        ),
    ),
    Operation("identity_full", ("alter table $t replica identity full",)),
    Operation(
        "identity_by_an_index",
        ("alter table $t replica identity using index $t_b", "update $t set id = 70 where b = 'b2'"),
        before=PLAIN.replace("b text", "b text not null") + "; create unique index $t_b on $t(b)",
        then=("insert into $t values (100, 1, 'z')", "update $t set id = 71, b = 'q' where b = 'b3'"),
    ),
    Operation(
        "identity_index_made_again_over_another_column",
        (
            "drop index $t_u",
            "insert into $t values (50, 50, 'b50')",
            "create unique index $t_u on $t(a); alter table $t replica identity using index $t_u",
            "update $t set id = 70 where a = 2; delete from $t where a = 3",
        ),
        before=PLAIN.replace("a int, b text", "a int not null, b text not null")
        + "; create unique index $t_u on $t(b); alter table $t replica identity using index $t_u",
        then=("insert into $t values (100, 100, 'z')", "update $t set b = 'q' where a = 4"),
    ),
    Operation(
        "key_made_again_under_full",
        (
            "alter table $t drop constraint $t_pkey",
            "insert into $t values (2, 20, 'twice')",
            "delete from $t where b = 'twice'; update $t set a = 7 where id = 3",
            "alter table $t add primary key (id)",
        ),
        before=FULL,
    ),
    Operation("key_dropped_under_full", ("alter table $t drop constraint $t_pkey",), Copies.SOME, FULL),
    Operation(
        "key_of_other_columns",
        ("alter table $t drop constraint $t_pkey, add primary key (id, a)", "update $t set a = 70 where id = 2"),
        Copies.SOME,
        then=("insert into $t(id, a) values (100, 1)", "delete from $t where id = 1"),
    ),
    Operation(
        "keyless_under_full",
        ("insert into $t values (1, 1, 'b1'); delete from $t where id = 2; update $t set a = 5 where id = 3",),
        Copies.NONE,
        PLAIN.replace(" primary key", "") + "; insert into $t select * from $t; alter table $t replica identity full",
    ),
)

NAMES = (
    Operation("renamed_and_back", ("alter table $t rename to $t__x", "alter table $t__x rename to $t")),
    Operation(
        "renamed", ("alter table $t rename to $t__new",), Copies.SOME, then=("insert into $t__new(id) values (100)",)
    ),
    Operation(
        "moved_and_back",
        (
            "alter table $t set schema elsewhere",
            "insert into elsewhere.$t values (50, 5, 'x')",
            "alter table elsewhere.$t set schema public",
        ),
        stages=(Stage.LISTED, Stage.ALL),
    ),
    Operation(
        "swapped",
        ("alter table $t__a rename to $t__x; alter table $t__b rename to $t__a; alter table $t__x rename to $t__b",),
        Copies.SOME,
        PLAIN.replace("$t", "$t__a") + "; " + PLAIN.replace("$t", "$t__b") + "; update $t__b set a = a + 1000",
        ("insert into $t__a(id) values (100)", "delete from $t__b where id = 1"),
        ("$t__a", "$t__b"),
        (Stage.LISTED, Stage.ALL),
    ),
    Operation(
        "swapped_in_steps",
        (
            "alter table $t__a rename to $t__x",
            "insert into $t__b values (50, 5, 'x')",
            "alter table $t__b rename to $t__a",
            "alter table $t__x rename to $t__b",
        ),
        Copies.SOME,
        PLAIN.replace("$t", "$t__a") + "; " + PLAIN.replace("$t", "$t__b") + "; update $t__b set a = a + 1000",
        ("insert into $t__a(id) values (100)", "delete from $t__b where id = 1"),
        ("$t__a", "$t__b"),
    ),
    Operation(
        "renamed_in_a_chain",
        (
            "alter table $t__c rename to $t__d; alter table $t__b rename to $t__c; alter table $t__a rename to $t__b;"
            " alter table $t__d rename to $t__a",
        ),
        Copies.SOME,
        "; ".join(PLAIN.replace("$t", f"$t__{x}") + f"; update $t__{x} set b = '{x}'" for x in "abc"),
        ("insert into $t__a(id) values (100)", "delete from $t__b where id = 1", "update $t__c set a = 0"),
        ("$t__a", "$t__b", "$t__c"),
    ),
    Operation(
        "replaced_by_a_filled_one",
        (
            "create table $t__new (like $t including all); insert into $t__new select id, a * 10, 'new' from $t;"
            " alter publication shop add table $t__new",
            "begin; alter table $t rename to $t__old; alter table $t__new rename to $t; commit",
            "alter publication shop drop table $t__old; drop table $t__old",
        ),
        Copies.SOME,
    ),
    Operation(
        "dropped_and_made_again",
        (
            "drop table $t",
            "create table $t(id int primary key, a int, b text); insert into $t values (2, 9, 'new');"
            " alter publication shop add table $t",
        ),
        Copies.SOME,
    ),
    Operation(
        "dropped_and_made_again_at_once",
        (
            "drop table $t; create table $t(id int primary key, a int, b text); insert into $t values (2, 9, 'new');"
            " alter publication shop add table $t",
        ),
        Copies.SOME,
    ),
    Operation(
        "schema_renamed",
        ("alter schema $t_s rename to $t_r",),
        Copies.SOME,
        "create schema $t_s; " + PLAIN.replace("$t", "$t_s.$t"),
        ("insert into $t_r.$t(id) values (100)",),
        ("$t_s.$t",),
    ),
    Operation(
        "inherited",
        (
            "alter table $t__child inherit $t",
            "insert into $t__child values (70, 7, 'x')",
            "alter table $t__child no inherit $t",
        ),
        Copies.NONE,
        PLAIN + "; " + PLAIN.replace("$t", "$t__child"),
        members=("$t", "$t__child"),
    ),
)

OPERATIONS = (*HARMLESS, *REWRITES, *IDENTITIES, *NAMES)
