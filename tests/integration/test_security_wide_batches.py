"""What a batch asks of Spark does not grow with the square of a table's columns: a source's owner chooses how many there are.

Counted, not timed: calls into the JVM, and how often a statement names the columns.
"""

from __future__ import annotations

from typing import Any

import pytest
from py4j.java_gateway import GatewayClient
from py4j.protocol import MEMORY_COMMAND_NAME
from pyspark.sql import SparkSession

from headwater.events import UNCHANGED
from headwater.schema.table import ReplicatedTableSchema
from tests.integration.lake_destination import Lake, change_run, delete, insert, table_schema, update
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS

NARROW, WIDE = 5, 60
BIGINT, TEXT = 20, 25


def copied(lake: Lake, columns: int) -> ReplicatedTableSchema:
    schema = table_schema(("id", BIGINT), *((f"c{number}", TEXT) for number in range(1, columns)))
    lake.copy(schema, [row(id, columns, "a") for id in (1, 2, 3)])
    return schema


def row(id: int, columns: int, value: Any) -> tuple[Any, ...]:
    return (id, *(value for _ in range(1, columns)))


def write(lake: Lake, schema: ReplicatedTableSchema, lsn: int) -> None:
    size = len(schema.columns)
    changes = insert(*row(lsn, size, "b")), update(*row(1, size, f"c{lsn}"))
    lake.write(change_run(schema, lsn, *changes, delete(*row(lsn - 100, size, None))))


def test_a_batch_makes_no_call_into_the_jvm_for_each_column(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    send = GatewayClient.send_command

    def counted(self: GatewayClient, command: str, *arguments: Any, **named: Any) -> Any:
        # Objects of earlier tests that are let go meanwhile are no calls of the batch.
        if not command.startswith(MEMORY_COMMAND_NAME):
            calls.append(1)
        return send(self, command, *arguments, **named)

    made = {}
    for columns in (NARROW, WIDE):
        schema = copied(lake, columns)
        write(lake, schema, 200)  # what only a first batch asks
        with monkeypatch.context() as patch:
            patch.setattr(GatewayClient, "send_command", counted)
            calls.clear()
            write(lake, schema, 300)
        made[columns] = len(calls)
    assert made[NARROW] > 0
    assert made[WIDE] - made[NARROW] < WIDE - NARROW, made


def test_a_batch_is_merged_by_a_statement_that_lists_no_columns(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    execute = SparkSession.sql

    def kept(self: SparkSession, statement: str, *arguments: Any, **named: Any) -> Any:
        statements.append(statement)
        return execute(self, statement, *arguments, **named)

    monkeypatch.setattr(SparkSession, "sql", kept)
    schema = copied(lake, WIDE)
    write(lake, schema, 200)
    (merge,) = (statement for statement in statements if statement.startswith("MERGE"))
    assert "`c1`" not in merge
    assert lake.rows(schema) == sorted(
        [row(200, WIDE, "b"), row(1, WIDE, "c200"), row(2, WIDE, "a"), row(3, WIDE, "a")], key=repr
    )


def test_values_that_were_not_sent_are_kept_beside_columns_that_changed(lake: Lake) -> None:
    schema = copied(lake, WIDE)
    some = [UNCHANGED if number % 2 else "new" for number in range(1, WIDE)]
    lake.write(change_run(schema, 200, update(2, *some), insert(*row(7, WIDE, None)), delete(*row(3, WIDE, None))))
    kept = tuple("a" if value is UNCHANGED else value for value in some)
    assert lake.rows(schema) == sorted([row(1, WIDE, "a"), (2, *kept), row(7, WIDE, None)], key=repr)
