"""Tables of an id and a counter, which tests of a pipeline copy and change."""

from __future__ import annotations

from tests.conftest import Database


def create_counter_tables(database: Database, **rows: int) -> None:
    """Each of a name with so many rows: ids from 1 on, counters 1. All are in the publication `shop`."""
    for table, count in rows.items():
        database.execute(f"create table {table}(id int primary key, counter int not null)")
        database.execute(f"insert into {table} select i, 1 from generate_series(1, {count}) i")
    database.execute(f"create publication shop for table {', '.join(rows)}")
