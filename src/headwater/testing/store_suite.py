"""What every store must do, as tests: derive a class from `StoreSuite` and give it a fixture that makes a store.

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def make_store(self, tmp_path):
            return lambda pipeline_id: MyStore(tmp_path / "state", pipeline_id)

`make_store` gives a store of the pipeline that is not started yet; called again with the same number, one that sees
what the first has written, if `persistent` is true. Run it with pytest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from headwater.contracts.stores import (
    APPLY,
    Lineage,
    OperationKind,
    PipelineStore,
    TableSchemaRetention,
    TableStateOperation,
)
from headwater.errors import StoreError
from headwater.lsn import EndLsn
from headwater.schema.table import SnapshotId, TableId
from headwater.states import DATA_SYNC, FINISHED_COPY, INIT, READY, SYNC_WAIT, TableState, catchup, sync_done
from headwater.testing.store_runs import MakeStore, StoreRuns
from headwater.testing.store_samples import (
    SYNC_A,
    SYNC_B,
    A,
    B,
    C,
    assert_whole,
    fill,
    table_error,
    table_metadata,
    table_schema,
    versions,
)

THREADS = 8


class StoreSuite(StoreRuns):
    """Derive, give it `make_store`, and set `persistent` to False for a store that ends with its process."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        raise NotImplementedError("a store suite needs a make_store fixture")

    @pytest.fixture
    def open_store(self, make_store: MakeStore) -> Iterator[MakeStore]:
        opened: list[PipelineStore] = []

        def open_store(pipeline_id: int) -> PipelineStore:
            store = make_store(pipeline_id)
            opened.append(store)
            store.start()
            store.load_table_states()
            store.load_table_schemas()
            store.load_destination_tables_metadata()
            return store

        yield open_store
        for store in opened:
            store.close()

    @pytest.fixture
    def store(self, open_store: MakeStore) -> PipelineStore:
        return open_store(1)

    # Schemas.

    def test_a_schema_is_the_newest_at_or_before_the_position_asked_for(self, store: PipelineStore) -> None:
        for snapshot_id in (100, 300, 200):
            store.store_table_schema(table_schema(A, snapshot_id, f"c{snapshot_id}"))
        wanted = {99: None, 100: 100, 199: 100, 200: 200, 299: 200, 300: 300, 2**63: 300}
        for asked, expected in wanted.items():
            found = store.get_table_schema(A, SnapshotId(asked))
            assert (None if found is None else found.snapshot_id) == expected, asked
        assert store.get_table_schema(B, SnapshotId(300)) is None

    def test_a_schema_comes_back_equal_in_every_part(self, store: PipelineStore) -> None:
        schema = table_schema(C, 2**40 + 7, "a", "b")
        assert store.store_table_schema(schema) == schema
        assert store.get_table_schema(C, SnapshotId(2**41)) == schema

    def test_the_same_version_stored_again_replaces_it(self, store: PipelineStore) -> None:
        store.store_table_schema(table_schema(A, 100))
        store.store_table_schema(table_schema(A, 100, "late"))
        assert store.get_table_schema(A, SnapshotId(100)) == table_schema(A, 100, "late")
        assert len(store.get_table_schemas()) == 1

    def test_all_cached_versions_are_listed(self, store: PipelineStore) -> None:
        schemas = [table_schema(A, 100), table_schema(A, 200), table_schema(B, 50)]
        for schema in schemas:
            store.store_table_schema(schema)
        assert sorted(store.get_table_schemas(), key=lambda s: (s.id, s.snapshot_id)) == schemas

    def test_pruning_keeps_the_newest_at_or_before_the_boundary_and_all_newer(self, store: PipelineStore) -> None:
        for snapshot_id in (100, 200, 300, 400):
            store.store_table_schema(table_schema(A, snapshot_id))
            store.store_table_schema(table_schema(B, snapshot_id))
        assert store.prune_table_schemas({A: TableSchemaRetention(EndLsn(350))}) == 2
        assert versions(store) == {A: [300, 400], B: [100, 200, 300, 400]}
        assert store.get_table_schema(A, SnapshotId(299)) is None

    def test_pruning_at_a_version_keeps_that_version(self, store: PipelineStore) -> None:
        for snapshot_id in (100, 200, 300):
            store.store_table_schema(table_schema(A, snapshot_id))
        assert store.prune_table_schemas({A: TableSchemaRetention(EndLsn(200))}) == 1
        assert versions(store) == {A: [200, 300]}

    def test_pruning_before_the_first_version_removes_nothing(self, store: PipelineStore) -> None:
        store.store_table_schema(table_schema(A, 100))
        boundaries = {A: TableSchemaRetention(EndLsn(99)), B: TableSchemaRetention(EndLsn(500))}
        assert store.prune_table_schemas(boundaries) == 0
        assert store.prune_table_schemas({}) == 0
        assert versions(store) == {A: [100]}

    # States.

    def test_an_unknown_table_has_no_state(self, store: PipelineStore) -> None:
        assert store.get_table_state(A) is None
        assert dict(store.get_table_states()) == {}

    @pytest.mark.parametrize(
        "state", [INIT, DATA_SYNC, FINISHED_COPY, READY, sync_done(EndLsn(2**40)), table_error()], ids=str
    )
    def test_a_state_comes_back_equal_in_every_part(self, store: PipelineStore, state: TableState) -> None:
        store.update_table_state(A, state)
        assert store.get_table_state(A) == state
        assert dict(store.get_table_states()) == {A: state}

    def test_a_state_keeps_whether_the_table_was_copied_before_through_a_reset_too(self, open_store: MakeStore) -> None:
        store = open_store(1)
        store.update_table_states([(A, replace(READY, copied=True)), (B, READY)])
        store.reset_table_states_for_resync()
        if self.persistent:
            store.close()
            store = open_store(1)
        states = store.get_table_states()
        assert dict(states) == {A: INIT, B: INIT}
        assert (states[A].copied, states[B].copied) == (True, False), "a skipped first copy would be skipped again"

    def test_fingerprints_are_kept_replaced_and_deleted_with_their_table(self, open_store: MakeStore) -> None:
        store, other = open_store(1), open_store(2)
        store.update_table_states([(A, READY), (B, READY)])
        store.store_table_fingerprints({A: "one", B: "two"})
        store.store_table_fingerprints({A: "one, changed", C: "three"})
        assert other.get_table_fingerprints() == {}
        store.prepare_table_state_for_copy(C)
        store.delete_table_state(B)
        if self.persistent:
            store.close()
            store = open_store(1)
        assert store.get_table_fingerprints() == {A: "one, changed", C: "three"}

    @pytest.mark.parametrize("state", [SYNC_WAIT, catchup(EndLsn(5))], ids=str)
    def test_a_memory_only_state_is_refused_and_nothing_of_the_update_is_kept(
        self, store: PipelineStore, state: TableState
    ) -> None:
        store.update_table_state(A, INIT)
        with pytest.raises(StoreError):
            store.update_table_states([(A, DATA_SYNC), (B, state)])
        assert dict(store.get_table_states()) == {A: INIT}

    def test_several_states_are_updated_at_once(self, store: PipelineStore) -> None:
        store.update_table_states([(A, INIT), (B, INIT)])
        store.update_table_states([(B, DATA_SYNC), (C, READY)])
        assert dict(store.get_table_states()) == {A: INIT, B: DATA_SYNC, C: READY}
        store.update_table_states([])

    def test_states_that_were_handed_out_do_not_change(self, store: PipelineStore) -> None:
        store.update_table_state(A, INIT)
        before = store.get_table_states()
        store.update_table_states([(A, DATA_SYNC), (B, INIT)])
        assert dict(before) == {A: INIT}

    def test_rollback_goes_back_to_the_state_before_the_last_recorded_one(self, store: PipelineStore) -> None:
        for state in (INIT, DATA_SYNC, table_error()):
            store.update_table_state(A, state)
        assert store.rollback_table_state(A) == DATA_SYNC
        assert store.get_table_state(A) == DATA_SYNC
        assert store.rollback_table_state(A) == INIT
        assert store.get_table_state(A) == INIT

    def test_rollback_without_an_earlier_state_is_refused(self, store: PipelineStore) -> None:
        with pytest.raises(StoreError):
            store.rollback_table_state(A)
        store.update_table_state(A, INIT)
        with pytest.raises(StoreError):
            store.rollback_table_state(A)
        assert store.get_table_state(A) == INIT

    def test_a_state_recorded_after_a_rollback_can_be_rolled_back_too(self, store: PipelineStore) -> None:
        for state in (INIT, table_error()):
            store.update_table_state(A, state)
        store.rollback_table_state(A)
        store.update_table_state(A, DATA_SYNC)
        assert store.rollback_table_state(A) == INIT

    # Progress.

    def test_progress_never_moves_back(self, store: PipelineStore) -> None:
        assert store.get_replication_progress(APPLY) is None
        assert store.upsert_replication_progress(APPLY, EndLsn(2**33)) == EndLsn(2**33)
        assert store.upsert_replication_progress(APPLY, EndLsn(100)) == EndLsn(2**33)
        assert store.get_replication_progress(APPLY) == EndLsn(2**33)
        assert store.upsert_replication_progress(APPLY, EndLsn(2**33 + 1)) == EndLsn(2**33 + 1)
        assert store.get_replication_progress(APPLY) == EndLsn(2**33 + 1)

    def test_the_lineage_recorded_last_is_the_one_that_counts_until_a_reset(self, open_store: MakeStore) -> None:
        store, other = open_store(1), open_store(2)
        assert store.get_lineage() is None
        for timeline in (2**32 - 1, 3, 3):
            store.record_lineage(Lineage("18446744073709551615", timeline))
        assert store.get_lineage() == Lineage("18446744073709551615", 3)
        assert other.get_lineage() is None
        other.record_lineage(Lineage("7", 1))
        if self.persistent:
            assert open_store(1).get_lineage() == Lineage("18446744073709551615", 3)
        store.reset_table_states_for_resync()
        assert store.get_lineage() is None
        assert other.get_lineage() == Lineage("7", 1)

    def test_each_worker_has_its_own_progress(self, store: PipelineStore) -> None:
        for position, worker in enumerate((APPLY, SYNC_A, SYNC_B), 10):
            store.upsert_replication_progress(worker, EndLsn(position))
        store.delete_replication_progress(SYNC_A)
        found = [store.get_replication_progress(worker) for worker in (APPLY, SYNC_A, SYNC_B)]
        assert found == [EndLsn(10), None, EndLsn(12)]

    def test_deleted_progress_may_start_lower_again(self, store: PipelineStore) -> None:
        store.delete_replication_progress(APPLY)
        store.upsert_replication_progress(APPLY, EndLsn(100))
        store.delete_replication_progress(APPLY)
        assert store.get_replication_progress(APPLY) is None
        assert store.upsert_replication_progress(APPLY, EndLsn(5)) == EndLsn(5)

    # Destination metadata.

    def test_metadata_comes_back_equal_in_every_part(self, store: PipelineStore) -> None:
        assert store.get_destination_table_metadata(A) is None
        store.store_destination_table_metadata(A, table_metadata("lake.public.a"))
        assert store.get_destination_table_metadata(A) == table_metadata("lake.public.a")
        store.store_destination_tables_metadata({A: table_metadata("lake.public.a", 2**40), B: table_metadata("b")})
        assert store.get_destination_table_metadata(A) == table_metadata("lake.public.a", 2**40)
        assert store.get_destination_table_metadata(B) == table_metadata("b")

    def test_applied_metadata_is_given_only_when_applied(self, store: PipelineStore) -> None:
        assert store.get_applied_destination_table_metadata(A) is None
        store.store_destination_table_metadata(A, table_metadata("a"))
        with pytest.raises(StoreError):
            store.get_applied_destination_table_metadata(A)
        store.store_destination_table_metadata(A, table_metadata("a").applied())
        assert store.get_applied_destination_table_metadata(A) == table_metadata("a").applied()

    # Lifecycle.

    def test_preparing_for_a_copy_keeps_the_state_and_other_tables(self, store: PipelineStore) -> None:
        fill(store)
        store.prepare_table_state_for_copy(A)
        assert store.get_table_state(A) == READY
        assert store.get_destination_table_metadata(A) is None
        assert store.get_table_schema(A, SnapshotId(2**40)) is None
        assert store.get_replication_progress(SYNC_A) is None
        assert store.get_replication_progress(APPLY) == EndLsn(1000)
        assert_whole(store, B, SYNC_B)

    def test_a_reset_leads_every_table_to_init_and_keeps_all_but_apply_progress(self, store: PipelineStore) -> None:
        fill(store)
        store.update_table_state(C, table_error())
        assert store.reset_table_states_for_resync() == 3
        assert dict(store.get_table_states()) == {A: INIT, B: INIT, C: INIT}
        assert store.get_replication_progress(APPLY) is None
        for table_id, worker in ((A, SYNC_A), (B, SYNC_B)):
            assert store.get_replication_progress(worker) == EndLsn(500)
            assert store.get_destination_table_metadata(table_id) == table_metadata(f"t{table_id}")
            assert store.get_table_schema(table_id, SnapshotId(150)) == table_schema(table_id, 100)

    def test_a_reset_of_nothing_touches_nothing(self, store: PipelineStore) -> None:
        assert store.reset_table_states_for_resync() == 0

    def test_deleting_a_table_forgets_all_of_it_and_nothing_else(self, store: PipelineStore) -> None:
        fill(store)
        store.delete_table_state(A)
        assert dict(store.get_table_states()) == {B: READY}
        assert store.get_destination_table_metadata(A) is None
        assert store.get_table_schema(A, SnapshotId(2**40)) is None
        assert store.get_replication_progress(SYNC_A) is None
        assert store.get_replication_progress(APPLY) == EndLsn(1000)
        with pytest.raises(StoreError):
            store.rollback_table_state(A)
        assert_whole(store, B, SYNC_B)

    def test_lifecycle_operations_bear_being_repeated(self, store: PipelineStore) -> None:
        fill(store)
        for _ in range(2):
            store.prepare_table_state_for_copy(A)
            store.delete_table_state(B)
            assert store.reset_table_states_for_resync() == 1
        assert dict(store.get_table_states()) == {A: INIT}

    @pytest.mark.parametrize("kind", [OperationKind.PREPARE_FOR_COPY, OperationKind.DELETE])
    def test_operations_on_a_table_tell_whether_they_touched_it(
        self, store: PipelineStore, kind: OperationKind
    ) -> None:
        fill(store)
        assert store.apply_table_state_operation(TableStateOperation(kind, A)) == 1
        assert store.apply_table_state_operation(TableStateOperation(kind, C)) == 0
        with pytest.raises(StoreError):
            store.apply_table_state_operation(TableStateOperation(kind))

    # Several at once.

    def test_two_pipelines_do_not_see_each_other(self, open_store: MakeStore) -> None:
        one, two = open_store(1), open_store(2)
        fill(one)
        assert dict(two.get_table_states()) == {}
        assert two.load_table_states() == two.load_table_schemas() == two.load_destination_tables_metadata() == 0
        assert two.get_table_schema(A, SnapshotId(2**40)) is None
        assert two.get_replication_progress(APPLY) is None
        two.update_table_state(A, DATA_SYNC)
        two.upsert_replication_progress(APPLY, EndLsn(1))
        assert two.reset_table_states_for_resync() == 1
        two.delete_table_state(A)
        assert_whole(one, A, SYNC_A)
        assert_whole(one, B, SYNC_B)
        assert one.get_replication_progress(APPLY) == EndLsn(1000)

    def test_a_new_start_finds_what_was_recorded(self, open_store: MakeStore) -> None:
        if not self.persistent:
            pytest.skip("this store is not persistent")
        first = open_store(1)
        fill(first)
        first.update_table_states([(B, table_error()), (C, INIT), (C, DATA_SYNC)])
        first.delete_table_state(A)
        first.close()
        again = open_store(1)
        assert dict(again.get_table_states()) == {B: table_error(), C: DATA_SYNC}
        assert again.load_table_states() == 2
        assert again.load_table_schemas() == 2
        assert again.load_destination_tables_metadata() == 1
        assert again.get_table_schema(B, SnapshotId(150)) == table_schema(B, 100)
        assert again.get_destination_table_metadata(B) == table_metadata(f"t{B}")
        assert again.get_replication_progress(APPLY) == EndLsn(1000)
        assert again.upsert_replication_progress(APPLY, EndLsn(999)) == EndLsn(1000)
        assert again.rollback_table_state(B) == READY

    def test_threads_that_record_progress_leave_the_highest(self, store: PipelineStore) -> None:
        def record(thread: int) -> None:
            for step in range(20):
                sent = EndLsn(1 + step * THREADS + thread)
                assert not store.upsert_replication_progress(APPLY, sent) < sent

        _in_threads(record)
        assert store.get_replication_progress(APPLY) == EndLsn(20 * THREADS)

    def test_threads_that_work_on_their_own_tables_do_not_disturb_each_other(self, store: PipelineStore) -> None:
        def work(thread: int) -> None:
            table_id = TableId(20000 + thread)
            for round_ in range(5):
                store.prepare_table_state_for_copy(table_id)
                store.store_table_schema(table_schema(table_id, 100 + round_))
                store.store_destination_table_metadata(table_id, table_metadata(f"t{thread}", round_))
                for state in (INIT, DATA_SYNC, FINISHED_COPY, sync_done(EndLsn(round_)), READY):
                    store.update_table_state(table_id, state)
                    assert store.get_table_state(table_id) == state

        _in_threads(work)
        tables = [TableId(20000 + thread) for thread in range(THREADS)]
        assert dict(store.get_table_states()) == dict.fromkeys(tables, READY)
        assert versions(store) == {table_id: [104] for table_id in tables}


def _in_threads(work: Callable[[int], None]) -> None:
    together = threading.Barrier(THREADS)

    def run(thread: int) -> None:
        together.wait(30)
        work(thread)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run, thread) for thread in range(THREADS)]:
            done.result()
