"""Many operations at once against a real lake: one pipeline, a table or a few for each, one comparison by another engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.conftest import Database
from tests.fuzz import membership_operations, table_operations
from tests.fuzz.operation import Stage, setup
from tests.fuzz.verdict import Moment, perform
from tests.integration.catalog_lake import lake_run
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS

LISTED = {
    "truncated_and_filled",
    "vacuumed_full_with_toast",
    "grant_on_a_column",
    "column_dropped_and_added_at_once",
    "column_retyped_to_itself",
    "column_added_with_constant",
    "column_renamed",
    "columns_swap_names",
    "enum_value_renamed",
    "expression_set",
    "key_made_again_under_full",
    "key_of_other_columns",
    "keyless_under_full",
    "identity_index_made_again_over_another_column",
    "swapped",
    "swapped_in_steps",
    "renamed_in_a_chain",
    "replaced_by_a_filled_one",
    "dropped_and_made_again_at_once",
    "leaf_made_and_filled",
    "leaf_truncated",
    "leaf_detached",
    "root_truncated",
    "left_and_came_back",
    "rows_filtered",
    "columns_listed",
}
ALL = {
    "unlogged_and_logged",
    "made_by_a_query_and_renamed",
    "made_and_filled",
    "leaf_attached_of_all",
    "leaf_detached_of_all",
    "moved_and_back",
    "swapped",
    "truncated_of_all",
}
OPERATIONS = (*table_operations.OPERATIONS, *membership_operations.OPERATIONS)


@pytest.mark.invariant(17)
@pytest.mark.parametrize(
    ("stage", "names", "moment"),
    [
        pytest.param(Stage.LISTED, LISTED, Moment.WITHIN_ONE_LOOK, id="listed-within_one_look"),
        pytest.param(Stage.LISTED, LISTED, Moment.WHILE_STOPPED, id="listed-while_stopped"),
        pytest.param(Stage.ALL, ALL, Moment.LOOKED_AT, id="all-looked_at"),
        pytest.param(Stage.ALL, ALL, Moment.WHILE_STOPPED, id="all-while_stopped"),
    ],
)
def test_the_lake_is_equal_after_many_operations_at_once(
    database: Database, spark: SparkSession, tmp_path: Path, stage: Stage, names: set[str], moment: Moment
) -> None:
    operations = [operation for operation in OPERATIONS if operation.name in names and stage in operation.stages]
    assert {operation.name for operation in operations} == names
    with lake_run(database, spark, tmp_path, setup(stage, operations)) as run:
        problems = {name: found for name, found in perform(run, operations, moment).items() if found}
    assert not problems, "\n".join(f"{name}: {line}" for name, found in problems.items() for line in found)
