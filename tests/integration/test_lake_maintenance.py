"""Compaction, expiry and rollback of lake tables by other programs beside the pipeline (invariants 5 and 20)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headwater.destinations.iceberg.table import STAGING, WATERMARK_TAG
from headwater.errors import WatermarkError
from headwater.schema.table import ReplicaIdentity, ReplicatedTableSchema
from tests.integration.lake_destination import ID_V, Lake, change_run, insert, table_schema, truncate, update
from tests.integration.pyspark_sockets import PYSPARK_SOCKETS

pytestmark = PYSPARK_SOCKETS

REWRITE = "rewrite_data_files", "options => map('rewrite-all', 'true')"
MANIFESTS = "rewrite_manifests", "use_caching => false"
EXPIRE = "expire_snapshots", "older_than => now(), retain_last => 1"
ORPHANS = "remove_orphan_files", "dry_run => false"


def maintain(lake: Lake, schema: ReplicatedTableSchema, *procedures: tuple[str, str]) -> None:
    for name, arguments in procedures:
        lake.spark.sql(f"CALL lake.system.{name}(table => '{schema.name}', {arguments})").collect()


def refs(lake: Lake, schema: ReplicatedTableSchema) -> list[str]:
    return sorted(row.name for row in lake.spark.sql(f"SELECT name FROM {lake.identifier(schema)}.refs").collect())


@pytest.mark.invariant(20)
@pytest.mark.parametrize(
    "procedures",
    [(REWRITE, EXPIRE, ORPHANS), (MANIFESTS, REWRITE, REWRITE, EXPIRE, EXPIRE), (EXPIRE, REWRITE, MANIFESTS, ORPHANS)],
    ids=["rewrite-expire", "three-commits-expire", "expire-rewrite"],
)
def test_compaction_and_expiry_by_others_leave_the_watermark_reachable(
    lake: Lake, procedures: Sequence[tuple[str, str]]
) -> None:
    """Of a table with a key, one that only appends, and one that was truncated last."""
    keyed, truncated = table_schema(*ID_V), table_schema(*ID_V)
    appended = table_schema(*ID_V, key=(), replica_identity=ReplicaIdentity.NOTHING)
    for schema in (keyed, truncated, appended):
        lake.copy(schema, [(1, "a"), (2, "b")])
    lake.write(
        change_run(keyed, 200, update(1, "A")),
        truncate(truncated, 200), change_run(truncated, 201, insert(1, "A")),
        change_run(appended, 200, insert(3, "c")),
    )  # fmt: skip
    for schema in (keyed, truncated, appended):
        maintain(lake, schema, *procedures)
    lake.write(*(change_run(schema, 300, insert(4, "d")) for schema in (keyed, truncated, appended)))
    # Replayed, as after a crash: nothing of it is written twice.
    lake.write(*(change_run(schema, 300, insert(4, "d")) for schema in (keyed, truncated, appended)))
    assert lake.rows(keyed) == [(1, "A"), (2, "b"), (4, "d")]
    assert lake.rows(truncated) == [(1, "A"), (4, "d")]
    assert lake.rows(appended) == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    assert refs(lake, keyed) == [STAGING, WATERMARK_TAG, "main"]


@pytest.mark.invariant(5)
def test_a_rollback_is_seen_even_when_compaction_and_expiry_follow_it(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a"), (2, "b")])
    lake.write(change_run(schema, 200, update(1, "b")))
    before = lake.snapshots(schema)[-1].snapshot_id
    lake.write(change_run(schema, 300, update(1, "c")))
    maintain(lake, schema, ("rollback_to_snapshot", f"snapshot_id => {before}"), REWRITE, MANIFESTS, EXPIRE)
    with pytest.raises(WatermarkError, match="behind the recorded position"):
        lake.write(change_run(schema, 400, update(1, "d")))
    assert lake.rows(schema) == [(1, "b"), (2, "b")]


@pytest.mark.invariant(5)
def test_a_watermark_that_nothing_leads_to_any_more_is_an_error_and_no_guess(lake: Lake) -> None:
    schema = table_schema(*ID_V)
    lake.copy(schema, [(1, "a"), (2, "b")])
    lake.write(change_run(schema, 200, update(1, "b")))
    maintain(lake, schema, REWRITE, REWRITE, EXPIRE)
    keep = f"ALTER TABLE {lake.identifier(schema)} SET TBLPROPERTIES ('write.metadata.previous-versions-max' = '1', 'x' = '%d')"
    for number in range(2):
        lake.spark.sql(keep % number)
    with pytest.raises(WatermarkError, match="has no watermark"):
        lake.write(change_run(schema, 400, update(1, "d")))
