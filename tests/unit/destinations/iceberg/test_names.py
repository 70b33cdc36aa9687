"""What columns are called in the lake whose names Iceberg or Spark keep for themselves."""

from __future__ import annotations

import pytest

from headwater.destinations.iceberg.names import RESERVED, in_lake_names, lake_names, names_property, source_schema
from headwater.schema.table import (
    ColumnSchema,
    ReplicaIdentity,
    ReplicatedTableSchema,
    TableId,
    TableName,
    TableSchema,
)
from headwater.schema.types import BUILT_IN


def table(*names: str, **more: object) -> TableSchema:
    columns = tuple(ColumnSchema(name, BUILT_IN[25], attnum=i + 1) for i, name in enumerate(names))
    return TableSchema(TableId(1), TableName("public", "t"), columns, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_reserved_name_gets_another_one_that_is_free_whatever_its_case(name: str) -> None:
    assert lake_names(table("id", name)) == {name: f"{name}_"}
    assert lake_names(table("id", name.upper())) == {name.upper(): f"{name.upper()}_"}
    assert lake_names(table(f"{name.upper()}_", name)) == {name: f"{name}__"}
    assert lake_names(table(name, name.upper())) == {name: f"{name}_", name.upper(): f"{name.upper()}__"}


def test_other_names_stay_and_nothing_is_made_for_them() -> None:
    schema = ReplicatedTableSchema(table("id", "_", "pos", "_posx", "row"))
    assert in_lake_names(schema) is schema
    assert names_property(schema.table_schema) == {}


def test_key_mask_and_source_survive_the_renaming() -> None:
    plain = table("_pos", "v", "w", replica_identity=ReplicaIdentity.INDEX, identity_columns=("_pos",))
    schema = ReplicatedTableSchema(plain, (True, False, True))
    named = in_lake_names(schema)
    assert named.key == ("_pos_",)
    assert [column.name for column in named.columns] == ["_pos_", "w"]
    assert source_schema(named) is schema
    assert names_property(plain) == {"headwater.column-names": '{"_pos": "_pos_"}'}
