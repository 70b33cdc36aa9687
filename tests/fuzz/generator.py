"""Random statements over a handful of tables of different shapes: rows, and whatever changes the catalog around them.

A statement is made from the catalog as it is and one seeded source of randomness, so a seed is a script. It need not be
valid: what the source refuses is left out, and the oracle compares with what the source made of the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.conftest import Database

SHAPES = (
    "create schema elsewhere",
    "create type mood as enum ('sad', 'glad', 'calm')",
    "create type pair as (m mood, n int)",
    "create domain small as int check (value < 1000000)",
    "create table plain(id int primary key, a int, b text)",
    "create table keyless(id int, a int, b text)",
    "alter table keyless replica identity full",
    "create table twofold(x int, id int, b text, primary key (x, id))",
    "create table typed(id int primary key, m mood, ms mood[], p pair, s small)",
    "create table made(id int primary key, a int, g int generated always as (a * 2) stored)",
    "create table parted(id int primary key, a int, b text) partition by range (id)",
    "create table parted_1 partition of parted for values from (0) to (100)",
    "create table parted_2 partition of parted for values from (100) to (200)",
    "insert into plain select i, i, 'b' from generate_series(1, 20) i",
    "insert into keyless select i / 2, 1, 'b' from generate_series(1, 20) i",
    "insert into twofold select i % 3, i, 'b' from generate_series(1, 20) i",
    "insert into typed select i, 'sad', '{glad}', '(calm,1)', i from generate_series(1, 20) i",
    "insert into made select i, i from generate_series(1, 20) i",
    "insert into parted select i, i, 'b' from generate_series(1, 199, 10) i",
)
PUBLICATIONS = (
    "create publication shop for table plain, keyless, twofold, typed, made, parted"
    " with (publish_via_partition_root = true, publish_generated_columns = stored)",
    "create publication shop for all tables with (publish_via_partition_root = true)",
    "create publication shop for tables in schema public with (publish_via_partition_root = true)",
)
_TABLES = """
select c.oid::regclass::text, c.relkind = 'p', c.relispartition,
       array(select a.attname::text from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
             and a.attgenerated = '' order by a.attnum),
       array(select format_type(a.atttypid, null) from pg_attribute a where a.attrelid = c.oid and a.attnum > 0
             and not a.attisdropped and a.attgenerated = '' order by a.attnum)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and n.nspname in ('public', 'elsewhere') order by c.oid
"""


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    partitioned: bool
    leaf: bool
    columns: dict[str, str]
    """Type by name, without generated ones."""


FOCUSED, MASKED = 10_000, 20_000
"""From these seeds on. (A list that grows makes other scripts of the seeds there are.)"""


class Generator:
    """A focused seed has few kinds of statements, and few of them in a round: what one of them does is not covered up by
    another that has the same table copied anyway. Masked: there is something else with the same traces too."""

    def __init__(self, seed: int, database: Database) -> None:
        self._random = random.Random(seed)
        self._database = database
        self._fresh = 0
        kinds: list[Callable[[Table], Sequence[str]]] = [
            *[self._harmless, self._columns, self._columns, self._identity, self._names, self._types, self._storage],
            *[self._partitions] * 2,
            *[self._publication] * 2,
            *([self._masked] * 3 if seed >= MASKED else []),
        ]
        self._kinds = self._random.sample(kinds, self._random.choice([1, 1, 2])) if seed >= FOCUSED else kinds
        self.rounds, self.statements = (12, self._random.choice([2, 3, 5])) if seed >= FOCUSED else (6, 15)

    def setup(self) -> list[str]:
        return [*SHAPES, self._random.choice(PUBLICATIONS)]

    def chance(self, of: float) -> bool:
        return self._random.random() < of

    def next_statements(self) -> Sequence[str]:
        """One statement, or a few that belong together."""
        tables = self._tables()
        roots = [table for table in tables if not table.leaf]
        table = self._random.choice(roots)
        if self.chance(0.45):
            return [self._rows(table)]
        return self._random.choice(self._kinds)(table)

    # What is there

    def _tables(self) -> list[Table]:
        rows = self._database.execute(_TABLES)
        return [
            Table(name, parted, leaf, dict(zip(cols, types, strict=True))) for name, parted, leaf, cols, types in rows
        ]

    def _name(self, prefix: str) -> str:
        self._fresh += 1
        return f"{prefix}{self._fresh}"

    def _column(self, table: Table) -> str:
        others = [column for column in table.columns if column not in ("id", "x")]
        return self._random.choice(others or ["id"])

    # Rows

    def _value(self, type: str) -> str:
        number = self._random.randrange(200)
        if self.chance(0.1):
            return "null"
        if type in ("integer", "bigint", "small", "numeric"):
            return str(number)
        if type in ("text", "character varying"):
            # Sometimes large enough for TOAST.
            return f"repeat(md5('{number}'), 300)" if self.chance(0.3) else f"'t{number}'"
        if type in ("mood", "mood[]", "pair"):
            # Whatever its labels are called by now.
            label = f"(enum_range(null::mood))[{1 + number % 3}]"
            return {"mood": label, "mood[]": f"array[{label}]", "pair": f"row({label}, {number})::pair"}[type]
        return "null"

    def _rows(self, table: Table) -> str:
        choice = self._random.randrange(5)
        some = f"id % 7 = {self._random.randrange(7)}"
        if choice <= 1:
            values = ", ".join(self._value(type) for type in table.columns.values())
            return f"insert into {table.name} ({', '.join(table.columns)}) values ({values})"
        if choice == 2:
            return f"delete from {table.name} where {some}"
        if choice == 3:
            column = self._column(table)
            return f"update {table.name} set {column} = {self._value(table.columns.get(column, ''))} where {some}"
        return f"update {table.name} set id = id + {self._random.choice([1000, 100, -100])} where {some} and id < 100"

    # The catalog

    def _harmless(self, table: Table) -> Sequence[str]:
        column = self._column(table)
        return [
            self._random.choice(
                [
                    f"grant select ({column}) on {table.name} to public",
                    f"comment on table {table.name} is 'x'",
                    f"analyze {table.name}",
                    f"vacuum {table.name}",
                    f"create index on {table.name}({column})",
                    f"alter table {table.name} alter {column} set statistics 10",
                    f"alter table {table.name} alter {column} set storage external",
                    f"begin; alter table {table.name} add {self._name('c')} int default 5; rollback",
                    f"begin; truncate {table.name}; rollback",
                ]
            )
        ]

    def _columns(self, table: Table) -> Sequence[str]:
        column, fresh, alter = self._column(table), self._name("c"), f"alter table {table.name}"
        type = table.columns.get(column, "integer")
        return self._random.choice(
            [
                [f"{alter} add {fresh} int default {self._random.randrange(100)}"],
                [f"{alter} add {fresh} text"],
                [f"{alter} add {fresh} int default (random() * 100)::int"],
                [f"{alter} drop {column}"],
                [f"{alter} drop {column}, add {column} {type}"],
                [f"{alter} rename {column} to {fresh}"],
                [f"{alter} rename {column} to {fresh}", f"{alter} rename {fresh} to {column}"],
                [f"{alter} alter {column} type int using {self._random.randrange(100)}"],
                [f"{alter} alter {column} type bigint using {self._random.randrange(100)}"],
                [f"{alter} alter {column} set default null"],
                [f"begin; {alter} add {fresh} int; {alter} drop {fresh}; commit"],
                ["alter table made alter g set expression as (a * " + str(self._random.randrange(9)) + ")"],
                ["alter table made alter g drop expression"],
            ]
        )

    def _identity(self, table: Table) -> Sequence[str]:
        alter = f"alter table {table.name}"
        constraint = table.name.split(".")[-1] + "_pkey"
        return self._random.choice(
            [
                [f"{alter} replica identity full"],
                [f"{alter} replica identity default"],
                [f"{alter} replica identity nothing", self._rows(table), f"{alter} replica identity default"],
                [f"{alter} drop constraint {constraint}", self._rows(table), f"{alter} add primary key (id)"],
                [f"{alter} drop constraint {constraint}, add constraint {constraint} primary key (id)"],
            ]
        )

    def _names(self, table: Table) -> Sequence[str]:
        alter, other = f"alter table {table.name}", self._random.choice(self._tables())
        bare, other_bare = table.name.split(".")[-1], other.name.split(".")[-1]
        away = "elsewhere" if "." not in table.name else "public"
        moved = f"{away}.{bare}"
        back = "public" if away == "elsewhere" else "elsewhere"
        fresh = self._name("t")
        return self._random.choice(
            [
                [f"{alter} rename to {fresh}"],
                [f"{alter} rename to {fresh}", f"alter table {fresh} rename to {bare}"],
                [
                    f"begin; {alter} rename to {fresh}; alter table {other.name} rename to {bare};"
                    f" alter table {fresh} rename to {other_bare}; commit"
                ],
                [f"{alter} set schema {away}"],
                [f"{alter} set schema {away}", self._rows(table), f"alter table {moved} set schema {back}"],
                [f"create table {fresh}(id int primary key, a int)", f"insert into {fresh} values (1, 2)"],
                [f"create table {fresh} as select * from {table.name}"],
            ]
        )

    def _types(self, table: Table) -> Sequence[str]:
        labels = [label for (label,) in self._database.execute("select unnest(enum_range(null::mood))::text")]
        old, new = self._random.choice(labels), self._name("l")
        return self._random.choice(
            [
                [f"alter type mood rename value '{old}' to '{new}'"],
                [f"alter type mood add value '{new}'"],
                [f"alter type pair add attribute {new} int"],
                ["alter type mood rename to mood2", "alter type mood2 rename to mood"],
                ["alter domain small set default 3"],
            ]
        )

    def _storage(self, table: Table) -> Sequence[str]:
        alter = f"alter table {table.name}"
        return self._random.choice(
            [
                [f"vacuum full {table.name}"],
                [f"truncate {table.name}"],
                [f"truncate {table.name}; {self._rows(table)}"],
                [f"begin; savepoint s; truncate {table.name}; release s; {self._rows(table)}; commit"],
                [f"begin; savepoint s; truncate {table.name}; rollback to s; {self._rows(table)}; commit"],
                [f"{alter} set unlogged", self._rows(table), f"{alter} set logged"],
            ]
        )

    def _partitions(self, table: Table) -> Sequence[str]:
        tables = self._tables()
        parted = [found for found in tables if found.partitioned]
        leaves = [found for found in tables if found.leaf]
        if not parted or not leaves:
            return [self._rows(table)]
        root, leaf, fresh = self._random.choice(parted).name, self._random.choice(leaves).name, self._name("p")
        low = 200 + 100 * self._fresh
        span = f"for values from ({low}) to ({low + 100})"
        filled = f"create table {fresh} (like {root} including all); insert into {fresh}(id) values ({low + 1})"
        return self._random.choice(
            [
                [f"truncate {leaf}"],
                [f"create table {fresh} partition of {root} {span}", f"insert into {root}(id) values ({low + 2})"],
                [f"{filled}; alter table {root} attach partition {fresh} {span}"],
                [filled, f"alter table {root} attach partition {fresh} {span}"],
                [f"alter table {root} detach partition {leaf}"],
                [f"drop table {leaf}"],
                [f"alter table {leaf} rename to {fresh}"],
                [f"alter table {leaf} replica identity full"],
                [f"vacuum full {leaf}"],
            ]
        )

    def _publication(self, table: Table) -> Sequence[str]:
        alter, rows = "alter publication shop", self._rows(table)
        return self._random.choice(
            [
                [f"{alter} drop table {table.name}"],
                [f"{alter} add table {table.name}"],
                [f"{alter} drop table {table.name}", rows, f"{alter} add table {table.name}"],
                [f"{alter} drop table {table.name}", f"{alter} add table {table.name} where (id > 5)", rows],
                [
                    f"{alter} set (publish = 'insert')",
                    rows,
                    f"{alter} set (publish = 'insert, update, delete, truncate')",
                ],
                [f"{alter} rename to away", rows, "alter publication away rename to shop"],
                [f"{alter} owner to pg_monitor"],
                [
                    f"{alter} set (publish_via_partition_root = false)",
                    rows,
                    f"{alter} set (publish_via_partition_root = true)",
                ],
            ]
        )

    def _masked(self, table: Table) -> Sequence[str]:
        """There and back, with rows in between; or beside what the stream tells."""
        alter, column, fresh = f"alter table {table.name}", self._column(table), self._name("c")
        (label, *_) = self._database.execute("select unnest(enum_range(null::mood))::text")[0]
        bare, values = table.name.split(".")[-1], ", ".join(self._value(type) for type in table.columns.values())
        insert = f"insert into {table.name} ({', '.join(table.columns)}) values ({values})"
        times = self._random.randrange(2, 9)
        return self._random.choice(
            [
                [
                    f"alter type mood rename value '{label}' to '{fresh}'",
                    f"insert into typed(id, m) values ({self._fresh + 500}, '{fresh}')",
                    f"alter type mood rename value '{fresh}' to '{label}'",
                ],
                [f"{alter} add {fresh} text", f"{alter} alter id type int using id + {times}", f"{alter} drop {fresh}"],
                [f"begin; truncate {table.name}; {insert}; {alter} alter {column} type int using {times}; commit"],
                [
                    "begin; truncate made; insert into made(id, a) values (1, 1); alter table made alter a type int using 7;"
                    " commit"
                ],
                [f"begin; truncate {table.name}; {insert}; commit", f"grant select on {table.name} to public"],
                [f"{alter} alter {column} type int using {times}", f"vacuum full {table.name}"],
                [
                    f"{alter} set schema elsewhere",
                    f"insert into elsewhere.{bare}(id) values ({self._fresh % 100})",
                    f"alter table elsewhere.{bare} set schema public",
                    insert,
                ],
                [
                    "alter publication shop drop tables in schema public",
                    insert,
                    "alter publication shop add tables in schema public",
                ],
                ["alter type pair drop attribute n", "alter type pair add attribute n int"],
                [f"alter schema public rename to {fresh}", f"alter schema {fresh} rename to public"],
                [f"{alter} alter {column} type int using {times}"],
            ]
        )
