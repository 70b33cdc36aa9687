"""The store contract over every store we ship."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.store.memory import MemoryStore
from headwater.store.postgres import PostgresStore
from headwater.testing.store_runs import MakeStore
from headwater.testing.store_suite import StoreSuite

# The suite is shipped, and our markers are unknown where it runs over a user's own store: its tests get them here.
pytest.mark.promise("errored tables keep their policy across restarts")(
    StoreSuite.test_a_state_comes_back_equal_in_every_part
)
pytest.mark.promise("rollback to the previous state")(
    StoreSuite.test_rollback_goes_back_to_the_state_before_the_last_recorded_one
)
pytest.mark.promise("full reset")(StoreSuite.test_a_reset_leads_every_table_to_init_and_keeps_all_but_apply_progress)
pytest.mark.promise("every lifecycle operation is atomic")(StoreSuite.test_several_states_are_updated_at_once)
pytest.mark.promise("every lifecycle operation is atomic")(
    StoreSuite.test_a_memory_only_state_is_refused_and_nothing_of_the_update_is_kept
)
pytest.mark.promise("progress is monotonic")(StoreSuite.test_progress_never_moves_back)
pytest.mark.invariant(10)(StoreSuite.test_progress_never_moves_back)
pytest.mark.promise("progress is monotonic")(StoreSuite.test_threads_that_record_progress_leave_the_highest)
pytest.mark.promise('schema versions by "newest at or before"')(
    StoreSuite.test_a_schema_is_the_newest_at_or_before_the_position_asked_for
)
pytest.mark.promise("pruning keeps the newest at or before the boundary")(
    StoreSuite.test_pruning_keeps_the_newest_at_or_before_the_boundary_and_all_newer
)
pytest.mark.promise("two pipelines in one store don't see each other")(
    StoreSuite.test_two_pipelines_do_not_see_each_other
)


class TestMemoryStore(StoreSuite):
    persistent = False

    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda pipeline_id: MemoryStore()


class TestPostgresStore(StoreSuite):
    @pytest.fixture
    def make_store(self, database: Any) -> MakeStore:
        return lambda pipeline_id: PostgresStore(database.settings, pipeline_id)
