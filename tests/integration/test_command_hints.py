"""What a new user meets first: a right that is missing, a name that is wrong, a slot that is gone. Each says what to do."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import sql

from headwater.errors import PrivilegeError
from headwater.schema.table import TableId, quote_identifier
from headwater.source.slots import apply_slot_name
from headwater.source.table_lock import table_lock
from headwater.states import INIT
from headwater.store.postgres import PostgresStore
from tests.commands import headwater, write_settings
from tests.conftest import Database
from tests.integration.running_pipeline import running


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        """
        create table orders(id int primary key); create table "Old ""orders"(id int primary key);
        create publication shop for all tables;
        """
    )
    return database


@pytest.fixture
def role(shop: Database) -> Iterator[str]:
    """One that may log in and replicate, and nothing else. Its name needs its quotes."""
    name = f'New "Röle" {uuid.uuid4().hex[:8]}'
    quoted = sql.Identifier(name)
    password = shop.settings.password
    assert password is not None
    shop.execute(sql.SQL("create role {} login replication password {}").format(quoted, sql.Literal(password.reveal())))
    yield name
    shop.execute(sql.SQL("drop owned by {}; drop role {}").format(quoted, quoted))


def hint_in(said: str) -> str:
    (hint,) = (line.removeprefix("hint: ") for line in said.splitlines() if line.startswith("hint: "))
    return hint


def grant_in(hint: str) -> str:
    """The statements that a hint says to run, as they stand there."""
    return hint.removeprefix("Run ").partition(";, or")[0]


def test_a_table_that_may_not_be_read_names_the_role_and_the_statement_that_mends_it(shop: Database, role: str) -> None:
    shop.execute('create schema "Hidden one"; create table "Hidden one".t(id int primary key)')
    shop.execute(sql.SQL("grant select on orders to {}").format(sql.Identifier(role)))
    tables = [
        TableId(shop.value("select %s::regclass::oid::bigint", [name]))
        for name in ("orders", '"Old ""orders"', '"Hidden one".t')
    ]
    settings = replace(shop.settings, username=role)
    with pytest.raises(PrivilegeError) as caught, table_lock(settings, tables):
        pass
    assert quote_identifier(role) in caught.value.message
    assert "public.orders" not in caught.value.hint
    shop.execute(grant_in(caught.value.hint))
    with table_lock(settings, tables) as lock:
        lock.check()


def test_a_store_that_may_not_be_made_names_the_statement_that_mends_it(
    shop: Database, role: str, tmp_path: Path
) -> None:
    file = write_settings(shop, tmp_path, username=role)
    hint = hint_in(headwater("resync", file, "public.orders", status=1))
    assert hint.startswith("Run GRANT CREATE ON DATABASE ")
    shop.execute(grant_in(hint))
    assert "1 table is copied again" in headwater("resync", file, "public.orders")


def test_the_error_for_a_store_of_another_role_names_the_statement_that_repairs_it(
    shop: Database, role: str, tmp_path: Path
) -> None:
    store = PostgresStore(shop.settings, 1)
    store.start()
    store.close()
    file = write_settings(shop, tmp_path, username=role)
    for expected in ("GRANT USAGE, CREATE ON SCHEMA headwater", "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES"):
        hint = hint_in(headwater("resync", file, "public.orders", status=1))
        assert hint.startswith(f"Run {expected}")
        shop.execute(grant_in(hint))
    assert "1 table is copied again" in headwater("resync", file, "public.orders")


def test_tables_tells_a_lost_slot_from_a_pipeline_that_never_started(shop: Database, tmp_path: Path) -> None:
    file = write_settings(shop, tmp_path)
    assert "pipeline 1: not running, never started" in headwater("tables", file)
    with running(shop, store=PostgresStore(shop.settings, 1)) as run:
        run.wait_states("ready", 2)
        run.stop()
    shop.execute("select pg_drop_replication_slot(%s)", [apply_slot_name(1)])
    said = headwater("tables", file)
    assert "never started" not in said
    assert f'error: replication slot "{apply_slot_name(1)}" does not exist\n' in said
    assert "headwater resync --all" in hint_in(said)


def test_remove_says_when_there_was_nothing_to_remove(shop: Database, tmp_path: Path) -> None:
    store = PostgresStore(shop.settings, 1)
    store.start()
    file = write_settings(shop, tmp_path, id=77)
    # Another pipeline's state is there, and stays.
    store.update_table_state(TableId(1), INIT)
    said = headwater("remove", file, "--yes")
    assert said.startswith("nothing was found: ")
    assert "no state of pipeline 77" in said
    assert "deleted" not in said
    store.load_table_states()
    assert list(store.get_table_states()) == [1]
    store.close()


@pytest.mark.invariant(16)
def test_a_missing_variable_for_a_password_is_named(shop: Database, tmp_path: Path) -> None:
    file = write_settings(shop, tmp_path)
    file.write_text(file.read_text().replace('{ file = "password" }', '{ env = "NO_SUCH_PASSWORD" }'))
    said = headwater("tables", file, status=2)
    assert "detail: pg_connection.password: the environment variable NO_SUCH_PASSWORD is not set" in said
    assert "***" not in said


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("public.ordres", "Did you mean public.orders? "),
        ("orders", "Did you mean public.orders? "),
        ("pubic.orders", "Did you mean public.orders"),
        ("public.nope", "Tables are written"),
    ],
)
def test_a_table_that_is_not_there_is_answered_with_the_nearest_names_and_how_to_list_all(
    shop: Database, tmp_path: Path, wrong: str, meant: str
) -> None:
    file = write_settings(shop, tmp_path)
    for command in ("resync", "rollback") if wrong == "public.ordres" else ("resync",):
        hint = hint_in(headwater(command, file, wrong, status=1))
        assert hint.startswith(meant)
        assert hint.endswith(f"headwater tables {file}")
    # A mistake leaves nothing behind.
    assert shop.value("select count(*) from pg_namespace where nspname = 'headwater'") == 0
