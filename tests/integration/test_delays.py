"""A read is answered, and before its reader goes on, the source changes: at each read that decides something (invariant 17).

What was read is old by then. Whatever is decided by it, every table ends equal.
"""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.conftest import Database
from tests.fuzz.catalog_run import model_run
from tests.fuzz.generator import MASKED, Generator
from tests.integration.run_after_call import run_after_call

READS = (
    "headwater.engine.apply.lineage:flush_lsn",
    "headwater.engine.apply.lineage:inspect_slot",
    "headwater.engine.supervise.resume:server_history",
    "headwater.engine.pipeline:published_tables",
    "headwater.engine.table_sync.copy_planner:load_table_schemas",
    "headwater.engine.table_sync.copy_planner:published_tables",
    "headwater.engine.table_sync.slot:current_timeline",
    "headwater.engine.table_sync.slot:flush_lsn",
    "headwater.engine.supervise.publication_watch:published_tables",
    "headwater.source.catalog_look:CatalogLooks.look",
    "headwater.source.catalog_look:insert_position",
    "headwater.source.exported_snapshot:TableLock.plan",
    "headwater.source.exported_snapshot:TableLock.check",
    "headwater.store.postgres:PostgresStore.get_table_fingerprints",
    "headwater.store.postgres:PostgresStore.load_table_states",
)
_TIMES = 12


class Meanwhile:
    """Changes the source behind a read, a few times. A statement that has to wait for the reader's own lock is left out."""

    def __init__(self, database: Database, seed: int) -> None:
        self._lock = threading.Lock()
        self._connection = database.connect()
        self._connection.execute("set lock_timeout = '50ms'")
        self._generator = Generator(seed, Database(database.server, database.name, self._connection))
        self.script: list[str] = []
        self.times = self._left = 0

    def act(self) -> None:
        with self._lock:
            if not self._left:
                return
            self._left -= 1
            self.times += 1
            for statement in self._generator.next_statements():
                try:
                    self._connection.execute(statement)
                    self.script.append(statement)
                except psycopg.Error:
                    self._connection.execute("rollback")

    def allow(self, times: int) -> None:
        with self._lock:
            self._left = times

    def close(self) -> None:
        with self._lock:
            self._connection.close()


@pytest.mark.invariant(17)
@pytest.mark.parametrize("read", READS)
def test_what_changes_behind_a_read_of_the_source_leaves_every_table_equal(database: Database, read: str) -> None:
    seed = MASKED + READS.index(read)
    with model_run(database, Generator(seed, database).setup()) as run:
        meanwhile = Meanwhile(database, seed)
        try:
            with run_after_call(read, meanwhile.act):
                for _ in range(2):
                    meanwhile.allow(_TIMES)
                    run.start()
                    run.execute(
                        f"alter table keyless add z{meanwhile.times} int; insert into twofold values (900, 900)"
                    )
                    run.see()
                    run.wait_settled()
                    meanwhile.allow(0)
                    run.barrier()
                    assert not run.differences(), meanwhile.script
                    run.try_to_execute("delete from twofold where id = 900")
                    run.stop()
        finally:
            meanwhile.close()
    assert meanwhile.times, "the read was never made"
