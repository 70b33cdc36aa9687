"""The one place that turns settings into objects: store, destination, Spark session, pipeline.

Importing this imports pyspark. No package below this one knows how the parts of another are made.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from headwater.config import Settings
from headwater.destinations.iceberg.destination import IcebergDestination
from headwater.destinations.iceberg.warehouse import spark_catalog
from headwater.engine.pipeline import Pipeline
from headwater.observability.progress import Progress
from headwater.spark.session import build_session
from headwater.store.from_settings import build_store


def build(settings: Settings, *, spark: SparkSession | None = None, progress: Progress | None = None) -> Pipeline:
    """A pipeline that is ready to start. Without a session given, one is started; the caller stops it in the end."""
    settings.validate()
    session = spark if spark is not None else build_spark(settings)
    store = build_store(settings)
    destination = IcebergDestination(session, store, settings.destination)
    return Pipeline(settings.pipeline, store, destination, spark=session, progress=progress)


def build_spark(settings: Settings) -> SparkSession:
    """The Spark session that the settings describe, with the lake's catalog in it."""
    return build_session(settings.spark, spark_catalog(settings.destination))
