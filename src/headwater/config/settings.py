"""The contents of one settings file: the pipeline, and the destination, store and Spark session for it.

Plain values only; `headwater.assembly` makes the objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from headwater.config.pipeline import PipelineConfig
from headwater.secret import Secret
from headwater.setting_rules import Checked, Mistake, Setting


class DestinationType(StrEnum):
    ICEBERG = "iceberg"


class DestinationMode(StrEnum):
    MIRROR = "mirror"


class CatalogType(StrEnum):
    SQLITE = "sqlite"
    JDBC = "jdbc"
    REST = "rest"
    HADOOP = "hadoop"
    HIVE = "hive"
    GLUE = "glue"


NEEDS_URI = frozenset({CatalogType.JDBC, CatalogType.REST, CatalogType.HIVE})


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogConfig(Checked):
    type: Annotated[
        CatalogType,
        Setting("The kind of catalog. `sqlite` is the file `catalog.db` in the warehouse, and needs no service."),
    ] = CatalogType.SQLITE
    name: Annotated[
        str, Setting("Its name in Spark: `public.orders` becomes `<name>.public.orders`.", not_empty=True)
    ] = "lake"
    uri: Annotated[str | None, Setting("The catalog's address, for the types that have one.", not_empty=True)] = None
    properties: Annotated[
        Mapping[str, Secret], Setting("Further properties, passed to the catalog as they are; never logged.")
    ] = field(default_factory=dict)

    def conflicts(self) -> Iterator[Mistake]:
        if self.type in NEEDS_URI and self.uri is None:
            yield Mistake("uri", f'missing; a catalog of type "{self.type}" needs its address')
        if self.type is CatalogType.SQLITE and self.uri is not None:
            yield Mistake("uri", 'a catalog of type "sqlite" is in the warehouse and takes no uri')
        if self.type is CatalogType.SQLITE and self.properties:
            yield Mistake("properties", 'a catalog of type "sqlite" takes none; choose another type')


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationConfig(Checked):
    type: Annotated[DestinationType, Setting("The kind of destination.")] = DestinationType.ICEBERG
    warehouse: Annotated[
        str,
        Setting(
            "Where the tables are: a directory, relative to the settings file, or an address such as `s3://bucket/lake`.",
            not_empty=True,
            path=True,
        ),
    ]
    mode: Annotated[DestinationMode, Setting("`mirror`: the lake table equals the source's.")] = DestinationMode.MIRROR
    catalog: Annotated[CatalogConfig, Setting("The Iceberg catalog.")] = field(default_factory=CatalogConfig)
    format_version: Annotated[int, Setting("Iceberg's format version of new tables.", at_least=2, at_most=3)] = 3
    table_properties: Annotated[
        Mapping[str, Secret], Setting('Further Iceberg properties of new tables, as `"name" = "value"`.')
    ] = field(default_factory=dict)
    max_parallel_tables: Annotated[int, Setting("Tables of a batch that are written at the same time.", above=0)] = 4

    def conflicts(self) -> Iterator[Mistake]:
        if (
            self.catalog.type is CatalogType.SQLITE
            and "://" in self.warehouse
            and not self.warehouse.startswith("file://")
        ):
            yield Mistake("catalog.type", '"sqlite" needs a warehouse on the local disk; choose another catalog')


class StoreType(StrEnum):
    MEMORY = "memory"
    POSTGRES = "postgres"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(Checked):
    type: Annotated[
        StoreType,
        Setting(
            "Where states and progress are kept. `memory` loses them at the end of a run: every start copies all tables."
        ),
    ] = StoreType.POSTGRES


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkConfig(Checked):
    master: Annotated[str, Setting("Spark's master.", not_empty=True)] = "local[*]"
    driver_memory: Annotated[str, Setting("Memory of the driver's JVM, in Spark's notation.", not_empty=True)] = "2g"
    conf: Annotated[
        Mapping[str, Secret],
        Setting(
            'Further Spark settings, as `"spark.name" = "value"`; never logged. `spark.sql.variable.substitute` stays off: '
            "it would change names of the source."
        ),
    ] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether driver and executors are one process, and so share a disk."""
        return self.master.startswith("local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Checked):
    what: ClassVar[str] = "the settings"

    pipeline: Annotated[PipelineConfig, Setting("The settings of the pipeline; they are at the top of the file.")]
    destination: Annotated[DestinationConfig, Setting("Where the data is written.")]
    store: Annotated[StoreConfig, Setting("Where the pipeline keeps its state.")] = field(default_factory=StoreConfig)
    spark: Annotated[SparkConfig, Setting("The Spark session.")] = field(default_factory=SparkConfig)

    def secrets(self) -> Iterator[str]:
        """What must never be shown: passwords, keys, and the free properties whose names say that they are secret."""
        for connection in (self.pipeline.pg_connection, self.pipeline.store_pg_connection):
            if connection is not None:
                yield from connection.secrets()
        for properties in (self.destination.catalog.properties, self.spark.conf):
            yield from (value.reveal() for name, value in properties.items() if _SECRET_NAME.search(name))


_SECRET_NAME = re.compile("secret|password|token|credential|key", re.IGNORECASE)
