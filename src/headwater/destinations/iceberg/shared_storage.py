"""Do driver and executors see the same files? Checked at start, where Spark's master is not local.

With a warehouse that is a path, each host writes data files to a disk of its own unless that path is shared: every commit
succeeds, and the lake names files that only one host has. So a table is made for a moment, in the pipeline's own catalog. Tasks
write rows to it and the driver reads the files; the driver writes files and tasks read the rows: both through the table's own
FileIO, as data files are written and read later.
"""

from __future__ import annotations

import io
import logging
import socket
import uuid
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from headwater.destinations.iceberg.table import LakeTable
from headwater.destinations.iceberg.types import quote
from headwater.errors import DestinationError, Retry

NAMESPACE = "headwater_probe"
_TASKS_PER_CORE = 2
"""So that most likely every executor gets one."""
_DRIVER = "the driver"
_COLUMNS = pa.schema(
    [
        pa.field("host", pa.string(), metadata={"PARQUET:field_id": "1"}),
        pa.field("token", pa.string(), metadata={"PARQUET:field_id": "2"}),
    ]
)
_ROWS = "host string, token string"
log = logging.getLogger(__name__)


def is_one_process(master: str) -> bool:
    """Whether driver and executors are one process. `local-cluster` starts processes for its executors."""
    return master == "local" or master.startswith("local[")


def check_shared(spark: SparkSession, catalog: str, warehouse: str) -> None:
    """DestinationError, with the names of the hosts, if a file that one of them writes is not visible to another."""
    namespace = f"{quote(catalog)}.{quote(NAMESPACE)}"
    identifier = f"{namespace}.{quote(f'probe_{uuid.uuid4().hex}')}"
    count = max(spark.sparkContext.defaultParallelism, 1) * _TASKS_PER_CORE
    spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")
    spark.sql(
        f"CREATE TABLE {identifier} ({_ROWS}) USING iceberg PARTITIONED BY (host)"
        " TBLPROPERTIES ('write.distribution-mode' = 'none', 'write.spark.fanout.enabled' = 'true')"
    )
    try:
        _write_from_tasks(spark, identifier, count)
        table = LakeTable.load(spark, identifier)
        assert table is not None, "it was just written"
        files = table.data_files()
        apart = {host for path, host in files if not _is_read(table, path)}
        if apart:
            raise _not_shared(warehouse, apart, "write files that the driver does not see")
        for number in range(count):
            table.add_data_file(_parquet(_DRIVER, str(number)), f"host={_DRIVER}")
        _read_in_tasks(spark, identifier, warehouse, {host for _, host in files}, count)
        log.info(
            "the warehouse is shared by the driver on %s and executors on %s", _here(), _listed(h for _, h in files)
        )
    finally:
        spark.sql(f"DROP TABLE IF EXISTS {identifier} PURGE")
        _drop_if_empty(spark, catalog, namespace)


def _write_from_tasks(spark: SparkSession, identifier: str, count: int) -> None:
    numbers = spark.sparkContext.parallelize(range(count), count)
    rows = numbers.map(lambda number: (socket.gethostname(), str(number)))
    spark.createDataFrame(rows, _ROWS).writeTo(identifier).append()


def _is_read(table: LakeTable, path: str) -> bool:
    data = table.read_file(path)
    return data is not None and pq.read_table(io.BytesIO(data)).num_rows > 0


def _parquet(host: str, token: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table([[host], [token]], schema=_COLUMNS), file)
    return file.getvalue()


def _read_in_tasks(spark: SparkSession, identifier: str, warehouse: str, hosts: set[str], count: int) -> None:
    # As expensive to open as a split is large: every file is a task of its own.
    frame = spark.read.option("split-size", 1 << 20).option("file-open-cost", 1 << 20).table(identifier)
    try:
        found = {row.token for row in frame.where(frame.host == _DRIVER).collect()}
    except Exception as error:
        raise _not_shared(warehouse, hosts, "do not see files of the driver, or not those of each other") from error
    if len(found) < count:
        raise _not_shared(warehouse, hosts, "do not see files of the driver")


def _drop_if_empty(spark: SparkSession, catalog: str, namespace: str) -> None:
    """Another pipeline may be at the same check."""
    try:
        if not spark.sql(f"SHOW TABLES IN {namespace}").collect():
            spark.sql(f"DROP NAMESPACE {namespace}")
    except Exception as error:
        log.info("namespace %s of catalog %s could not be dropped: %s", NAMESPACE, catalog, type(error).__name__)


def _not_shared(warehouse: str, hosts: set[str], what: str) -> DestinationError:
    return DestinationError(
        f"the warehouse {warehouse} is not shared by all hosts of the Spark cluster",
        detail=f"the driver runs on {_here()}; executors on {_listed(hosts)} {what}",
        hint="Set destination.warehouse to a URI that all hosts can use (s3, gs, hdfs), or mount one directory on all of them.",
        retry=Retry.NEVER,
    )


def _here() -> str:
    return socket.gethostname()


def _listed(hosts: Iterable[str]) -> str:
    return ", ".join(sorted(set(hosts)))
