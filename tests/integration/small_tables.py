"""Small tables, random changes of them, and a destination that blocks the copy of one of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from headwater.contracts.results import WriteTableRowsResult
from headwater.events import TableRows
from headwater.lsn import EndLsn
from headwater.schema.table import ReplicatedTableSchema
from tests.background_writes import writing_by
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables


def make_tables(database: Database, count: int, rows: int = 20, prefix: str = "t") -> list[str]:
    names = [f"{prefix}{number}" for number in range(count)]
    for name in names:
        database.execute(f"create table {name}(id int primary key, counter int not null, note text)")
        database.execute(f"insert into {name} select i, 1, '{name}' from generate_series(1, {rows}) i")
    database.execute("create publication shop for all tables")
    return names


class BlockingCopyDestination(MemoryTables):
    """Blocks the copy of one table until `open` is set, and keeps the position of each copy."""

    def __init__(self, held: str = "") -> None:
        super().__init__()
        self.held = held
        self.begun, self.open = threading.Event(), threading.Event()
        self.starts: dict[str, EndLsn] = {}

    def write_table_rows(
        self, replicated_table_schema: ReplicatedTableSchema, table_rows: TableRows, result: WriteTableRowsResult
    ) -> None:
        name = replicated_table_schema.name.name
        if name == self.held and not self.open.is_set():
            self.begun.set()
            assert self.open.wait(60)
        self.starts[name] = table_rows.start_lsn
        super().write_table_rows(replicated_table_schema, table_rows, result)


@contextmanager
def writing(database: Database, names: list[str], seed: int = 1) -> Iterator[None]:
    """Random transactions over all tables until the context ends."""
    choose = random.Random(seed)

    def change(connection: psycopg.Connection[tuple[Any, ...]], turn: int) -> None:
        with connection.transaction():
            for _ in range(choose.randint(1, 6)):
                name, id = choose.choice(names), choose.randrange(1, 60)
                connection.execute(
                    f"insert into {name} values ({id}, 1, 'new')"
                    f" on conflict (id) do update set counter = {name}.counter + 1"
                    if choose.random() < 0.8
                    else f"delete from {name} where id = {id}"
                )

    # At a steady pace: a writer without one takes the core that the pipeline needs.
    with writing_by(database, change, pace_seconds=0.005):
        yield
