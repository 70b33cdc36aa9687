"""A small shop: tables of many types, rows made inside the server, and a writer that writes continuously.

The demo's source, and a workload for tests. The writer does what is hard to replicate: keys that change while a large
value stays unsent, rows that are inserted and deleted within a transaction, savepoints rolled back, transactions of one row and
of hundreds.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from headwater.errors import HeadwaterError
from headwater.schema.table import TableName

Connection = psycopg.Connection[Any]
Connect = Callable[[], Connection]

PUBLICATION = "shop"
TABLES = tuple(TableName("public", name) for name in ("customers", "items", "orders", "products"))

DDL = """
create type order_status as enum ('new', 'paid', 'packed', 'shipped', 'returned');

create table customers (
    id bigint primary key,
    name text not null,
    email text,
    active boolean not null default true,
    balance numeric,                 -- no precision declared: kept exactly, as text
    tags text[],
    born date,
    profile jsonb,
    signed_up timestamptz not null
);

create table products (
    id uuid primary key,
    sku text not null,
    price numeric(10, 2) not null,
    weight real,
    sizes integer[],
    description text,                -- large ones are stored out of line and not sent unless they change
    updated_at timestamp not null
);
alter table products alter column description set storage external;

create table orders (
    id bigint primary key,
    customer_id bigint not null,
    status order_status not null,
    total numeric(12, 2) not null,
    placed_at timestamptz not null,
    shipped_on date,
    note text
);

create table items (
    order_id bigint not null,
    line integer not null,
    product_id uuid not null,
    quantity smallint not null,
    price numeric(10, 2) not null,
    gift boolean,
    primary key (order_id, line)
);

create publication shop for table customers, products, orders, items;
"""

# Shares of all rows; an order has two items.
_SHARES = {"customers": 0.10, "products": 0.02, "orders": 0.28, "items": 0.60}

_SEED = {
    "customers": """
        insert into customers
        select i,
               (array['Zoë', 'Jürgen', 'Σοφία', '美咲', 'Олена', 'Ana', 'Łukasz', 'नेहा'])[1 + i %% 8]
                   || ' ' || md5(i::text),
               case when i %% 11 > 0 then 'c' || i || '@example.com' end, i %% 7 > 0,
               case when i %% 5 > 0 then (i * 7919 %% 1000003)::numeric / (10 ^ (i %% 6))::numeric end,
               case i %% 4 when 0 then null when 1 then '{}' when 2 then array['vip', null, 'a "quote"', '']
                    else array['tag' || i %% 100] end,
               case when i %% 3 > 0 then date '1940-01-01' + (i * 37 %% 25000)::int end,
               case when i %% 6 > 0 then jsonb_build_object('visits', i %% 50, 'city', '東京', 'seen', null) end,
               timestamptz '2020-01-01 00:00:00.123456+00' + make_interval(secs => i * 61.000001)
        from generate_series(1, %(customers)s::bigint) i""",
    "products": """
        insert into products
        select md5('product ' || i)::uuid, 'SKU-' || i, (i * 31 %% 99999)::numeric / 100,
               case when i %% 9 > 0 then i * 0.1 end,
               case i %% 3 when 0 then null when 1 then '{}' else array[i, null, -i]::int[] end,
               case when i %% 4 = 0 then (select string_agg(md5(i || ':' || j), ' ') from generate_series(1, 90) j)
                    when i %% 4 = 1 then 'short' end,
               timestamp '2024-02-29 12:00' + make_interval(mins => i::int)
        from generate_series(1, %(products)s::bigint) i""",
    "orders": """
        insert into orders
        select i, 1 + i * 7 %% %(customers)s, (enum_range(null::order_status))[1 + i %% 5],
               (i * 17 %% 1000000)::numeric / 100,
               timestamptz '2024-01-01+00' + make_interval(secs => i * 13),
               case when i %% 5 > 2 then date '2024-01-02' + (i %% 300)::int end,
               case when i %% 10 = 0 then 'leave at the door, ' || chr(128512 + (i %% 50)::int)
                    when i %% 10 = 1 then '' end
        from generate_series(1, %(orders)s::bigint) i""",
    "items": """
        insert into items
        select 1 + i %% %(orders)s, 1 + i / %(orders)s, md5('product ' || 1 + i %% %(products)s)::uuid, 1 + i %% 9,
               (i %% 50000)::numeric / 100, case when i %% 3 > 0 then i %% 2 = 0 end
        from generate_series(0, %(items)s::bigint - 1) i""",
}


def create_shop(connection: Connection, rows: int = 200_000) -> dict[str, int]:
    """Make types, tables, publication and about `rows` rows. Returns the rows of each table."""
    connection.execute(DDL)
    counts = {table: max(10, round(rows * share)) for table, share in _SHARES.items()}
    for table, statement in _SEED.items():
        connection.execute(statement, counts)
        connection.execute(f"analyze {table}".encode())
    return counts


@dataclass(frozen=True, slots=True)
class CommitSample:
    """When a transaction was committed, by `time.monotonic`, and a position at or just past its end."""

    position: int
    committed_at: float


class ShopWriter:
    """Writes from one connection in a thread of its own, until stopped. The same seed makes the same transactions."""

    def __init__(self, connect: Connect, counts: dict[str, int], *, seed: int = 1, pause_seconds: float = 0.02) -> None:
        self._connect = connect
        self._customers, self._products = counts["customers"], counts["products"]
        self._next_order = counts["orders"] + 1
        self._first_live = 1
        self._random = random.Random(seed)
        self._pause_seconds = pause_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-shop-writer", daemon=True)
        self._error: BaseException | None = None
        self.transactions = 0
        self.rows_written = 0
        self.samples: list[CommitSample] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the transaction under way; raises what made the writer end early."""
        self._stop.set()
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise if the writer has ended early."""
        if self._error is not None:
            raise HeadwaterError(
                "the demo's writer failed", detail=str(self._error), hint="This is a defect of Headwater; report it."
            ) from self._error

    def _run(self) -> None:
        try:
            with self._connect() as connection:
                connection.autocommit = False
                while not self._stop.wait(self._pause_seconds):
                    self._transaction(connection)
        except BaseException as error:
            self._error = error

    def _transaction(self, connection: Connection) -> None:
        (kind,) = self._random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        written = kind(self, connection)
        if self._random.random() < 0.03:
            connection.rollback()
            return
        connection.commit()
        committed_at = time.monotonic()
        self.transactions += 1
        self.rows_written += written
        row = connection.execute("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
        connection.rollback()
        if row is not None:
            self.samples.append(CommitSample(int(row[0]), committed_at))

    # Each writes within the open transaction and returns how many rows it touched.

    def _sell(self, connection: Connection) -> int:
        order, self._next_order = self._next_order, self._next_order + 1
        connection.execute(
            "insert into orders values (%s, %s, 'new', %s, clock_timestamp(), null, %s)",
            [
                order,
                self._customer(),
                self._random.randrange(10**6) / 100,
                self._random.choice([None, "", "☃ fragile"]),
            ],
        )
        lines = self._random.randint(1, 4)
        for line in range(1, lines + 1):
            connection.execute(
                "insert into items values (%s, %s, md5(%s)::uuid, %s, %s, %s)",
                [order, line, self._product(), line, line * 2.5, self._random.choice([None, True, False])],
            )
        return 1 + lines

    def _ship(self, connection: Connection) -> int:
        return self._count(
            connection,
            "update orders set status = 'shipped', shipped_on = current_date, total = total + 0.01 where id = any(%s)",
            [self._orders(5)],
        )

    def _reprice(self, connection: Connection) -> int:
        """Large descriptions stay unchanged, so the server does not send them."""
        return self._count(
            connection,
            "update products set price = price + 0.01, updated_at = clock_timestamp() where id = md5(%s)::uuid",
            [self._product()],
        )

    def _rekey(self, connection: Connection) -> int:
        """A key that changes there and back again, with a large value unsent, and another that changes for good."""
        product = self._product()
        temporary = f"{product} moved"
        move = "update products set id = md5(%s)::uuid, price = price + 1 where id = md5(%s)::uuid"
        moved = self._count(connection, move, [temporary, product]) + self._count(
            connection, move, [product, temporary]
        )
        shift = "update items set line = line + 100 where order_id = %s and line < 100"
        return moved + self._count(connection, shift, [self._order()])

    def _cancel(self, connection: Connection) -> int:
        order, self._first_live = self._first_live, self._first_live + 1
        gone = self._count(connection, "delete from items where order_id = %s", [order])
        return gone + self._count(connection, "delete from orders where id = %s", [order])

    def _come_and_go(self, connection: Connection) -> int:
        """A row that is inserted, changed and deleted in one transaction, and a savepoint that never was."""
        order, self._next_order = self._next_order, self._next_order + 1
        connection.execute("insert into orders values (%s, 1, 'new', 1, clock_timestamp())", [order])
        connection.execute("savepoint regret")
        connection.execute("delete from customers where id = %s", [self._customer()])
        connection.execute("rollback to savepoint regret")
        connection.execute("update orders set status = 'returned' where id = %s", [order])
        connection.execute("delete from orders where id = %s", [order])
        return 3

    def _season(self, connection: Connection) -> int:
        """A medium transaction: some hundred customers at once, and new large descriptions."""
        first = self._random.randrange(1, max(2, self._customers - 400))
        touched = self._count(
            connection,
            "update customers set balance = coalesce(balance, 0) + 0.0001, tags = array_append(tags, 'season'), "
            "active = not active where id between %s and %s",
            [first, first + 400],
        )
        return touched + self._count(
            connection,
            "update products set description = "
            "(select string_agg(md5(%s || ':' || j), ' ') from generate_series(1, 80) j) where id = md5(%s)::uuid",
            [str(self._random.random()), self._product()],
        )

    def _count(self, connection: Connection, statement: str, parameters: list[Any]) -> int:
        return connection.execute(statement.encode(), parameters).rowcount

    def _customer(self) -> int:
        return self._random.randint(1, self._customers)

    def _product(self) -> str:
        return f"product {self._random.randint(1, self._products)}"

    def _order(self) -> int:
        return self._random.randint(self._first_live, self._next_order - 1)

    def _orders(self, count: int) -> list[int]:
        return [self._order() for _ in range(count)]


_WEIGHTS: dict[Callable[[ShopWriter, Connection], int], float] = {
    ShopWriter._sell: 40,
    ShopWriter._ship: 20,
    ShopWriter._reprice: 15,
    ShopWriter._rekey: 8,
    ShopWriter._cancel: 10,
    ShopWriter._come_and_go: 5,
    ShopWriter._season: 2,
}
