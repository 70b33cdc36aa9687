"""The role that docs/security.md gives is enough for a whole pipeline, and has no rights to write to the source's tables."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from headwater.config import PgConnectionConfig, Secret
from headwater.errors import StoreError
from headwater.store.postgres import PostgresStore
from tests.conftest import Database
from tests.integration.running_pipeline import running

PAGE = Path(__file__).parent.parent.parent / "docs" / "security.md"


@pytest.mark.versions(14, 18)
def test_the_role_of_the_security_page_copies_follows_and_keeps_its_state(database: Database) -> None:
    (statements,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    role = f"role_{database.name}"
    statements = statements.replace("headwater", role).replace("DATABASE shop", f'DATABASE "{database.name}"')
    database.execute(
        "revoke create on schema public from public; create table orders(id int primary key, n int);"
        " insert into orders select i, i from generate_series(1, 50) i; create publication shop for table orders"
    )
    database.execute(statements)
    try:
        password = Secret("choose one")
        settings = replace(database.settings, username=role, password=password)
        connection = PgConnectionConfig(
            host=settings.host, port=settings.port, name=settings.database, username=role, password=password
        )
        with running(database, store=PostgresStore(settings, 1), pg_connection=connection) as run:
            run.wait_states("ready", 1)
            database.execute(
                "update orders set n = 0 where id < 9; delete from orders where id = 20; create table items(id int primary key);"
                " alter publication shop add table items; insert into items values (1)"
            )
            run.wait_states("ready", 2)
            run.wait_caught_up()
            run.assert_equal("orders", "items")
        with (
            psycopg.connect(**settings.conninfo()) as session,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            session.execute("delete from orders")
    finally:
        database.execute(f"drop owned by {role} cascade; drop role {role}")


PREPARED = {
    "namespace": ("create schema headwater authorization {other}", "the namespace belongs to"),
    "table": (
        "create schema headwater; create table headwater.migrations(component text, version int, name text);"
        " alter table headwater.migrations owner to {other}",
        "relation migrations belongs to",
    ),
    "trigger": (
        "create schema headwater; create table headwater.migrations(component text, version int, name text);"
        " create function public.spy() returns trigger language plpgsql as 'begin raise $$it ran$$; end';"
        " create trigger t before insert on headwater.migrations for each row execute function public.spy()",
        "trigger t on migrations",
    ),
    "view": ("create schema headwater; create view headwater.migrations as select 1 as version", "rule _RETURN on"),
    "policy": (
        "create schema headwater; create table headwater.migrations(component text, version int, name text);"
        " create policy p on headwater.migrations using (true)",
        "policy p on migrations",
    ),
}


@pytest.mark.parametrize("prepared", PREPARED)
def test_a_namespace_with_objects_of_another_role_is_refused_and_nothing_in_it_runs(
    database: Database, prepared: str
) -> None:
    statement, said = PREPARED[prepared]
    other = f"other_{database.name}"
    database.execute(f'create role {other}; grant create on database "{database.name}" to {other}')
    try:
        database.execute(statement.replace("{other}", other))
        store = PostgresStore(database.settings, 1)
        with pytest.raises(StoreError, match="contains objects of other roles") as raised:
            store.start()
        store.close()
        assert said in raised.value.detail
    finally:
        database.execute(f"drop owned by {other} cascade; drop role {other}")


def test_no_command_runs_what_somebody_put_into_the_namespace_since(database: Database) -> None:
    store = PostgresStore(database.settings, 1)
    store.start()
    store.begin_run("a run")
    database.execute(
        "create function public.spy() returns trigger language plpgsql as 'begin raise $$it ran$$; end';"
        " create trigger t before delete on headwater.runs for each row execute function public.spy()"
    )
    try:
        for command in (store.exists, store.remove, store.start):
            with pytest.raises(StoreError, match="contains objects of other roles") as raised:
                command()
            assert "trigger t on runs" in raised.value.detail
        database.execute("drop trigger t on headwater.runs")
        assert store.exists()
        assert store.remove().was_last
    finally:
        store.close()
