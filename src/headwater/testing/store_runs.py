"""The part of the store suite about runs: writes of a run are refused after another run has begun. See `store_suite`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headwater.contracts.stores import APPLY, Lineage, PipelineStore, TableSchemaRetention, WorkerType
from headwater.errors import PipelineLocked
from headwater.lsn import EndLsn
from headwater.states import DATA_SYNC, INIT
from headwater.testing.store_samples import SYNC_A, SYNC_B, A, B, C, assert_whole, fill, table_metadata, table_schema

MakeStore = Callable[[int], PipelineStore]


class StoreRuns:
    persistent = True

    def test_a_run_writes_and_may_begin_again_and_so_does_a_later_one(self, open_store: MakeStore) -> None:
        store = open_store(1)
        for token in ("first", "first", "second"):
            store.begin_run(token)
            fill(store)
            store.check_run()
            store.delete_table_state(A)
            store.delete_table_state(B)

    def test_what_a_run_writes_after_another_began_is_refused_and_leaves_no_trace(self, open_store: MakeStore) -> None:
        if not self.persistent:
            pytest.skip("no other run can reach this store")
        old, other_pipeline = open_store(1), open_store(2)
        old.begin_run("old")
        fill(old)
        old.record_lineage(Lineage("7", 1))
        other_pipeline.begin_run("of another pipeline")
        old.check_run()
        new = open_store(1)
        new.begin_run("new")
        before = old.get_table_states()
        for write in _writes(old):
            with pytest.raises(PipelineLocked, match="taken over"):
                write()
        with pytest.raises(PipelineLocked, match="taken over"):
            old.check_run()
        assert old.get_table_states() == before, "what was refused is in the cache"
        again = open_store(1)
        for store in (new, again):
            assert_whole(store, A, SYNC_A)
            assert_whole(store, B, SYNC_B)
            assert store.get_replication_progress(APPLY) == EndLsn(1000)
            assert store.get_lineage() == Lineage("7", 1)
        for write in _writes(new):
            write()
        new.check_run()

    def test_a_command_without_a_run_writes_beside_one(self, open_store: MakeStore) -> None:
        if not self.persistent:
            pytest.skip("no command can reach this store")
        run, command = open_store(1), open_store(1)
        run.begin_run("run")
        fill(run)
        command.load_table_states()
        command.update_table_state(A, INIT)
        run.check_run()
        run.load_table_states()
        assert run.get_table_state(A) == INIT


def _writes(store: PipelineStore) -> list[Callable[[], object]]:
    """Each way to write, with something that is not on record, after `fill`."""
    return [
        lambda: store.update_table_states([(A, DATA_SYNC), (C, INIT)]),
        lambda: store.rollback_table_state(A),
        lambda: store.upsert_replication_progress(APPLY, EndLsn(2000)),
        lambda: store.upsert_replication_progress(WorkerType(C), EndLsn(1)),
        lambda: store.delete_replication_progress(SYNC_A),
        lambda: store.record_lineage(Lineage("8", 2)),
        lambda: store.store_table_schema(table_schema(A, 300)),
        lambda: store.store_destination_tables_metadata({A: table_metadata("elsewhere")}),
        lambda: store.prune_table_schemas({A: TableSchemaRetention(EndLsn(250))}),
        lambda: store.prepare_table_state_for_copy(A),
        lambda: store.reset_table_states_for_resync(),
        lambda: store.delete_table_state(A),
    ]
