"""Changes of the source in a thread, while a test does other things."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from tests.conftest import Database

Change = Callable[[psycopg.Connection[tuple[Any, ...]], int], None]
"""Makes the n-th change, n from 1 on, in one or several transactions."""


@contextmanager
def writing_by(database: Database, change: Change, pace_seconds: float = 0.0) -> Iterator[None]:
    """Make changes in a session of its own until the context ends. With a pace, the machine's cores are left to others."""
    stop, failures = threading.Event(), list[BaseException]()

    def write() -> None:
        turn = 0
        try:
            with database.connect() as connection:
                while not stop.wait(pace_seconds):
                    turn += 1
                    change(connection, turn)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write, name="writer")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failures, failures


@contextmanager
def writing(database: Database, seed: int = 1) -> Iterator[None]:
    """Inserts, updates, key changes and deletes of orders and items in random transactions, until the context ends."""
    choose = random.Random(seed)

    def change(connection: psycopg.Connection[tuple[Any, ...]], turn: int) -> None:
        with connection.transaction(force_rollback=choose.random() < 0.1):
            for _ in range(choose.randint(1, 8)):
                connection.execute(_statement(choose))

    with writing_by(database, change):
        yield


def _statement(choose: random.Random) -> str:
    table, id, kind = choose.choice(("orders", "items")), choose.randrange(1, 8000), choose.random()
    if kind < 0.4:
        return (
            f"insert into {table} values ({id}, 1, 'new') on conflict (id) do update set counter = {table}.counter + 1"
        )
    if kind < 0.7:
        return f"update {table} set counter = counter + 1 where id = {id}"
    if kind < 0.8:
        free = f"not exists (select from {table} where id = {id + 100000})"
        return f"update {table} set id = id + 100000 where id = {id} and {free}"
    return f"delete from {table} where id = {id}"
