"""Values of rows appear in no error, log line or record of the store (invariant 16)."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from headwater import errors
from headwater.errors import HeadwaterError, ServerError, ValueOutOfRange
from headwater.events import EventBatch, TableRows
from headwater.schema.table import ColumnSchema
from headwater.schema.types import BUILT_IN
from headwater.source.session import connect, translating
from headwater.store.postgres import PostgresStore
from headwater.wire.columns import decode_column
from headwater.wire.connection import WireConnection
from headwater.wire.letters import FIELD_TEXT
from tests.conftest import Database
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import running

VALUE = "4711-kept-secret"
DATE_OID = 1082


@pytest.mark.invariant(16)
@pytest.mark.parametrize(
    "statement",
    [
        f"insert into people values ('{VALUE}')",
        f"select '{VALUE}'::text::int",
        f"select '{VALUE}'::text::date",
        f"select ('{{\"a\": {VALUE}'::text)::jsonb",
        f"do $$ begin raise exception 'bad row' using detail = '{VALUE}'; end $$",
    ],
)
def test_what_the_server_says_of_a_value_is_shown_without_the_value(
    database: Database, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    database.execute(f"create table people(name text primary key); insert into people values ('{VALUE}')")
    statement = statement.replace("people", "public.people")
    with connect(database.settings) as session, pytest.raises(ServerError) as told, translating("trying it"):
        session.execute(statement.encode())
    assert VALUE not in str(told.value)
    assert told.value.sqlstate
    with WireConnection.connect(database.settings) as connection, pytest.raises(HeadwaterError) as wired:
        connection.query(statement)
    assert VALUE not in str(wired.value)
    monkeypatch.setattr(errors._Values, "shown", True)
    with connect(database.settings) as session, pytest.raises(ServerError) as whole, translating("trying it"):
        session.execute(statement.encode())
    assert "-kept" in str(whole.value)


@pytest.mark.invariant(16)
def test_a_text_that_arrow_cannot_cast_is_reported_without_the_text() -> None:
    data = np.frombuffer(VALUE.encode(), np.uint8).copy()
    column = ColumnSchema("day", BUILT_IN[DATE_OID], attnum=1)
    with pytest.raises(ValueOutOfRange) as told:
        decode_column(column, data, np.array([0]), np.array([len(data)]), FIELD_TEXT)
    assert "'day'" in str(told.value)
    assert VALUE not in str(told.value)


@pytest.mark.invariant(16)
@pytest.mark.parametrize("shown", [False, True], ids=["by default", "with the setting"])
def test_a_value_that_an_error_quotes_reaches_neither_log_nor_store_unless_a_setting_allows_it(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    monkeypatch.setattr(errors._Values, "shown", False)
    database.execute(f"create table people(id int primary key, name text); insert into people values (1, '{VALUE}')")
    database.execute("create table others(id int primary key); create publication shop for all tables")
    destination, store = MemoryTables(), PostgresStore(database.settings, 1)

    def quote(rows: TableRows) -> None:
        for row in rows.rows():
            raise ValueError(f"cannot write {row}")

    def quote_batch(batch: EventBatch) -> None:
        raise KeyError(next(event for event in batch.events() if hasattr(event, "new")))

    def told(text: str) -> bool:
        """With the setting, in every place; without it, in none."""
        return (VALUE in text) is shown

    destination.before_copy = quote
    with (
        caplog.at_level(logging.DEBUG),
        running(database, destination, store, table_error_retry_max_attempts=1, show_values_in_errors=shown) as run,
    ):
        run.wait_states("ready", 1)
        run.wait_states("errored", 1)
        destination.before_events = quote_batch
        database.execute("insert into others values (1)")
        with pytest.raises(HeadwaterError) as ended:
            run.pipeline.wait(60)
        assert "KeyError" in str(ended.value)
        assert told(str(run.pipeline.progress.snapshot()))
    assert "ValueError" in caplog.text
    assert told(caplog.text)
    assert told(str(database.execute("select * from headwater.table_states")))
    for table in ("destination_tables", "table_schemas", "replication_progress"):
        assert VALUE not in str(database.execute(f"select * from headwater.{table}")), table
