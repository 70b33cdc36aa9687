"""Partitioned tables whose root and leaves have each their own replica identity, published by the root.

The server shapes an old tuple by the leaf's identity and RELATION by the root's (invariant 13), so every pair is a case.
"""

from __future__ import annotations

from itertools import product

from tests.fuzz.catalog_run import CatalogRun

# How the root is made, after its columns; `$t` is the table.
ROOTS = {
    "default_with_key": "alter table $t add primary key (id)",
    "full": "alter table $t add primary key (id); alter table $t replica identity full",
    "index": "create unique index $t_u on $t(id, k); alter table $t replica identity using index $t_u",
    "nothing": "alter table $t add primary key (id); alter table $t replica identity nothing",
    "full_without_key": "alter table $t replica identity full",
    "default_without_key": "select",
}
_OWN_KEY = "do 'begin alter table $p add primary key (id); exception when others then null; end'"
# How a leaf is made; `$p` is the leaf. One that inherits a primary key has it already.
LEAVES = {
    "default": _OWN_KEY,
    "full": "alter table $p replica identity full",
    "index": "create unique index $p_k on $p(k); alter table $p replica identity using index $p_k",
    "nothing": "alter table $p replica identity nothing",
}
MIXED = "mixed"
"""The first leaf is FULL, the second has its primary key."""
CASES = list(product(ROOTS, [*LEAVES, MIXED]))

CHANGES = (
    "update $t set n = n + 100 where id in (1, 2)",
    "update $t set big = big || 'x' where id = 3",
    "delete from $t where id = 4",
    "update $t set id = id + 100 where id = 5",
    "update $t set id = id + 100, n = 0 where id = 105",
    "update $t set k = k - 5000 where id = 6",
    "update $t set id = id + 1000 where id = 7",
    "update $t set id = id + 1000, n = 0 where id = 8",
    "update $t set n = n + 100 where id = 1101",
    "delete from $t where id = 1102",
    "update $t set id = id + 50 where id = 1103",
    "insert into $t values (200, -200, 2, null), (1200, -1200, 2, null)",
    "begin; update $t set n = -1 where id = 9; update $t set id = 209 where id = 9; delete from $t where id = 209; commit",
)
"""One transaction each, because the source refuses some of them; values of `big` are large and mostly unchanged."""


def table_of(root: str, leaf: str) -> str:
    return f"{root}__{leaf}"


def setup() -> list[str]:
    statements = [
        "create function big(i int) returns text language sql as"
        " 'select string_agg(md5((i * 1000 + j)::text), '''') from generate_series(1, 200) j'"
    ]
    for root, leaf in CASES:
        table = table_of(root, leaf)
        leaves = ("full", "default") if leaf == MIXED else (leaf, leaf)
        made = [
            "create table $t(id int not null, k int not null, n int, big text) partition by range (id)",
            "alter table $t alter big set storage external",
            ROOTS[root],
        ]
        for number, identity in enumerate(leaves):
            span = f"from ({number * 1000}) to ({number * 1000 + 1000})"
            made.append(f"create table $t_{number} partition of $t for values {span}")
            made.append(LEAVES[identity].replace("$p", f"$t_{number}"))
        made.append("insert into $t select i, -i, i, big(i) from generate_series(1, 10) i")
        made.append("insert into $t select i, -i, i, big(i) from generate_series(1101, 1105) i")
        statements += [statement.replace("$t", table) for statement in made]
    tables = ", ".join(table_of(*case) for case in CASES)
    return [*statements, f"create publication shop for table {tables} with (publish_via_partition_root = true)"]


def judge(run: CatalogRun) -> dict[str, list[str]]:
    """Carry all changes out that the source takes; what is wrong with each table afterwards."""
    run.start()
    run.wait_settled()
    for case in CASES:
        for change in CHANGES:
            run.try_to_execute(change.replace("$t", table_of(*case)))
    run.barrier()
    differences, failures = run.differences(), run.failures()
    run.stop()
    problems: dict[str, list[str]] = {table_of(*case): [] for case in CASES}
    # A table that fails at its first change and is copied again ends equal, by luck and at the price of a copy a change.
    for table, why in run.refused():
        problems[table.name].append(f"a change was handed on that cannot be: {why}")
    for table, difference in differences.items():
        solution = failures[table].solution if table in failures else ""
        if "alter" not in solution.lower():
            problems[table.name].append(difference)
    return problems
