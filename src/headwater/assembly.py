"""The one place that turns settings into objects: store, destination, Spark session, pipeline.

Importing this imports pyspark. Nobody below knows how anything else is made.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from headwater.config import CatalogType, DestinationConfig, Settings
from headwater.destinations.iceberg.destination import IcebergDestination
from headwater.destinations.iceberg.settings import IcebergSettings
from headwater.engine.pipeline import Pipeline
from headwater.observability.progress import Progress
from headwater.spark.session import SparkSettings, build_session
from headwater.store.from_settings import build_store


def build(settings: Settings, *, spark: SparkSession | None = None, progress: Progress | None = None) -> Pipeline:
    """A pipeline that is ready to start. Without a session given, one is started; whoever calls stops it in the end."""
    settings.validate()
    session = spark if spark is not None else build_spark(settings)
    store = build_store(settings)
    destination = IcebergDestination(session, store, iceberg_settings(settings.destination))
    return Pipeline(settings.pipeline, store, destination, spark=session, progress=progress)


def build_spark(settings: Settings) -> SparkSession:
    """The Spark session that the settings describe, with the lake's catalog in it."""
    config = {name: value.reveal() for name, value in settings.spark.conf.items()}
    spark = SparkSettings(master=settings.spark.master, driver_memory=settings.spark.driver_memory, config=config)
    return build_session(spark, iceberg_settings(settings.destination).spark_catalog())


def iceberg_settings(destination: DestinationConfig) -> IcebergSettings:
    catalog = destination.catalog
    properties = {}
    # The embedded catalog is what the destination makes when nothing is said about one.
    if catalog.type is not CatalogType.SQLITE:
        properties = {"type": catalog.type.value} | ({"uri": catalog.uri} if catalog.uri is not None else {})
        properties |= {name: value.reveal() for name, value in catalog.properties.items()}
    return IcebergSettings(
        warehouse=destination.warehouse,
        catalog=catalog.name,
        catalog_properties=properties,
        format_version=destination.format_version,
        table_properties={name: value.reveal() for name, value in destination.table_properties.items()},
        max_parallel_tables=destination.max_parallel_tables,
    )
