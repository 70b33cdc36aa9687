"""Spark sessions for tables that are written at the same time.

The watermark of a SQL statement is a session setting, so every table under way needs a session of its own. Each opens a catalog
of its own, hence the bound.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark.sql import SparkSession

from headwater.destinations.iceberg.types import quote
from headwater.destinations.iceberg.watermark import PROPERTIES
from headwater.errors import HeadwaterError
from headwater.spark import sql_text
from headwater.spark.session import SCHEDULING_POOL

MAX_SESSIONS = 8
_SNAPSHOT_PROPERTY = "spark.sql.iceberg.snapshot-property."
_STATIC = frozenset({"spark.sql.extensions"})
_VECTORIZED = "spark.sql.iceberg.vectorization.enabled"


@dataclass(frozen=True, slots=True)
class LakeSession:
    """A session that one thread holds for one table."""

    spark: SparkSession
    job_group: str

    def set_snapshot_properties(self, properties: Mapping[str, str]) -> None:
        """What the next SQL statement writes into its lake snapshot; whatever was set before is gone."""
        for name in PROPERTIES:
            self.spark.conf.unset(_SNAPSHOT_PROPERTY + name)
        for name, value in properties.items():
            self.spark.conf.set(_SNAPSHOT_PROPERTY + name, value)

    def end_attempt(self) -> None:
        """Cancel what is left of this holder's jobs. The commit itself runs in the call that has returned."""
        self.spark.sparkContext.cancelJobGroup(self.job_group)


class SessionPool:
    """At most `size` sessions, made when needed, each used by one thread at a time."""

    def __init__(
        self, spark: SparkSession, catalog: str, settings: Mapping[str, str], size: int = MAX_SESSIONS
    ) -> None:
        # A copy's rows are a frame of this session, and its settings count where they are written.
        sql_text.switch_off(spark)
        self._spark = spark
        self._catalog = catalog
        self._opening = threading.Lock()
        self._settings = {key: value for key, value in settings.items() if key not in _STATIC}
        self._idle: queue.LifoQueue[SparkSession] = queue.LifoQueue()
        self._permits = threading.BoundedSemaphore(size)

    @contextmanager
    def session(self, purpose: str, names: Iterable[str]) -> Iterator[LakeSession]:
        """A session for this thread; its jobs share the cores fairly with those of other holders.

        `names` are those that will stand in its statements: NameSubstituted if Spark would not take one as it is.
        """
        with self._permits:
            try:
                spark = self._idle.get_nowait()
            except queue.Empty:
                spark = self._new()
            try:
                sql_text.check_names((self._catalog, *names), self._spark, spark)
            except HeadwaterError:
                self._idle.put(spark)
                raise
            context = spark.sparkContext
            group = f"headwater-{uuid.uuid4()}"
            context.setJobGroup(group, purpose, interruptOnCancel=True)
            if context.getLocalProperty(SCHEDULING_POOL) is None:
                # Within a pool jobs wait for each other, so each holder has one. A copy comes with its own.
                context.setLocalProperty(SCHEDULING_POOL, f"headwater-{threading.get_ident()}")
            _make_active(spark)
            try:
                yield LakeSession(spark, group)
            finally:
                self._idle.put(spark)
                _make_active(self._spark)

    def _new(self) -> SparkSession:
        session = self._spark.newSession()
        for key, value in self._settings.items():
            session.conf.set(key, value)
        # Iceberg 1.12 never closes the Arrow allocator of a vectorized Parquet reader (apache/iceberg issue 13937): each file
        # that a MERGE reads left 0.5 KiB in the heap for good, 0.2 MB a second at ten small commits a second. Reading by rows, a
        # MERGE of 100 rows into 2 million takes 0.7 s instead of 0.55 s, one of 200,000 rows the same time.
        session.conf.set(_VECTORIZED, str(self._spark.conf.get(_VECTORIZED, "false")))
        sql_text.switch_off(session)
        # A session opens its catalog at the first statement that names it, and makes the tables of a new JDBC catalog
        # then: two at once fail. A look-up by the Java API does not open it, and takes its name for a namespace.
        with self._opening:
            session.sql(f"SHOW NAMESPACES IN {quote(self._catalog)}")
        return session


def _make_active(spark: SparkSession) -> None:
    """A catalog is opened with the settings of the thread's active session, whichever session asked for it."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    jvm.SparkSession.setActiveSession(spark._jsparkSession)
