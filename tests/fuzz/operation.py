"""One operation on the catalog as data: what is there before, the statements, what must be copied again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from headwater.schema.table import TableName

PLAIN = (
    "create table $t(id int primary key, a int, b text);"
    " insert into $t select i, i, 'b' || i from generate_series(1, 5) i"
)
PARTITIONED = (
    "create table $t(id int primary key, a int, b text) partition by range (id);"
    " create table $t__p1 partition of $t for values from (0) to (1000);"
    " create table $t__p2 partition of $t for values from (1000) to (2000);"
    " insert into $t select i, i, 'b' || i from generate_series(1, 5) i;"
    " insert into $t select i, i, 'b' || i from generate_series(1001, 1005) i"
)
THEN = ("insert into $t(id) values (100)", "delete from $t where id = 1")


class Copies(Enum):
    """How often an operation may lead to a new copy."""

    NONE = "a table that was copied is not copied again"
    SOME = "there is at least one new copy"
    ANY = "a copy is allowed, and none is"


class Stage(Enum):
    """The publication that the operation's tables are in; `{tables}` is the list of them."""

    LISTED = "for table {tables} with (publish_via_partition_root = true, publish_generated_columns = stored)"
    ALL = "for all tables with (publish_via_partition_root = true)"
    SCHEMA = "for tables in schema public with (publish_via_partition_root = true)"
    LEAVES = "for table {tables}"


@dataclass(frozen=True, slots=True)
class Operation:
    """`$t` in statements is the operation's name, and every table of it is called `$t` or `$t__something`.

    Each step is sent as one: several statements in it are one transaction, unless they say BEGIN and COMMIT themselves.
    """

    name: str
    steps: tuple[str, ...]
    copies: Copies = Copies.ANY
    before: str = PLAIN
    then: tuple[str, ...] = THEN
    """Changes of rows after the operation was judged: the stream must still mean what it says."""
    members: tuple[str, ...] = ("$t",)
    stages: tuple[Stage, ...] = (Stage.LISTED,)
    alone: bool = False
    """It concerns the whole publication: every table is its own, whatever it is called."""

    def sql(self, text: str) -> str:
        return text.replace("$t", self.name)

    def owns(self, table: TableName) -> bool:
        return self.alone or re.fullmatch(rf"{self.name}(__\w+)?", table.name) is not None

    @property
    def pattern(self) -> str:
        """Finds the operation's tables in a line of the log."""
        return r"table " if self.alone else rf"\.{self.name}(__\w+)?\b"


def setup(stage: Stage, operations: Sequence[Operation]) -> list[str]:
    """What the source has before the pipeline starts."""
    tables = ", ".join(operation.sql(member) for operation in operations for member in operation.members)
    return [
        "create schema elsewhere",
        *(operation.sql(operation.before) for operation in operations),
        "create publication shop " + stage.value.format(tables=tables),
    ]
