"""Errors of the lake show no values of rows (invariant 16)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from headwater.destinations.iceberg.said import translated
from headwater.errors import HeadwaterError
from tests.integration.lake_destination import ID_V, Lake, table_schema
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS

SECRET = "4711471147"


def said(call: Any) -> HeadwaterError:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is, what is made of it counts
        call()
    assert SECRET in str(raised.value)
    return translated(raised.value)


@pytest.mark.invariant(16)
def test_errors_of_casts_and_of_statements_with_keys_show_no_value(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a")])
    table = lake.identifier(schema)
    told = [
        said(lambda: pa.array([int(SECRET)]).cast(pa.int32())),
        said(lambda: lake.spark.sql(f"SELECT CAST(concat(v, '{SECRET}') AS INT) FROM {table}").collect()),
        said(lambda: lake.spark.sql(f"INSERT INTO {table} SELECT CAST('x{SECRET}' AS BIGINT), 'b'")),
        said(lambda: lake.spark.sql(f"DELETE FROM {table} WHERE gone = {SECRET} AND id IN ({SECRET})")),
    ]
    for error in told:
        assert SECRET not in str(error)
        assert error.detail
    assert "CAST_INVALID_INPUT" in told[1].detail
