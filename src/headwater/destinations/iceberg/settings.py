"""Where the lake is, and how its catalog is reached: plain values and the Spark settings that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from headwater.errors import ConfigError
from headwater.private_files import make_directory, make_file

_NOT_ONLY_A_PATH = frozenset("%?#*[]{}\\")
EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
_BUSY_TIMEOUT_MS = 30_000


@dataclass(frozen=True, slots=True)
class IcebergSettings:
    """Without `catalog_properties` the catalog is the embedded one: a SQLite file inside the warehouse."""

    warehouse: str
    catalog: str = "lake"
    catalog_properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    format_version: int = 3
    table_properties: Mapping[str, str] = field(default_factory=dict)
    max_parallel_tables: int = 4

    @property
    def warehouse_path(self) -> Path | None:
        """The warehouse as a directory of this machine, if it is one."""
        parts = urlsplit(self.warehouse)
        if parts.scheme == "file":
            return Path(parts.path).absolute()
        return None if parts.scheme else Path(self.warehouse).absolute()

    @property
    def location(self) -> str:
        """The warehouse as catalogs understand it: absolute, or a URI."""
        path = self.warehouse_path
        return self.warehouse.rstrip("/") if path is None else str(path)

    def spark_catalog(self) -> dict[str, str]:
        """The Spark settings that make the catalog known under its name."""
        prefix = f"spark.sql.catalog.{self.catalog}"
        settings = {
            "spark.sql.extensions": EXTENSIONS,
            prefix: "org.apache.iceberg.spark.SparkCatalog",
            # A cached table would hide what another session has committed.
            f"{prefix}.cache-enabled": "false",
        }
        properties = dict(self.catalog_properties) or self._embedded_catalog()
        settings |= {f"{prefix}.{key}": value for key, value in properties.items()}
        settings.setdefault(f"{prefix}.warehouse", self.location)
        return settings

    def prepare(self) -> None:
        """Make the directory of the embedded catalog and its file, closed to other users; what is there keeps its mode."""
        path = self.warehouse_path
        if path is not None:
            _check_path(str(path))
        if path is not None and not self.catalog_properties:
            make_directory(path)
            # SQLite would make it readable by all. An empty file is an empty database.
            make_file(path / "catalog.db")

    def _embedded_catalog(self) -> dict[str, str]:
        # SQLite lets one writer in at a time; the others wait here instead of failing with SQLITE_BUSY.
        return {
            "type": "jdbc",
            "uri": f"jdbc:sqlite:file:{self.location}/catalog.db?busy_timeout={_BUSY_TIMEOUT_MS}",
            "jdbc.schema-version": "V1",
            "warehouse": self.location,
        }


def _check_path(path: str) -> None:
    """SQLite and Hadoop read paths as URIs and as patterns: the catalog of `a%20b` would be that of `a b`."""
    odd = sorted(_NOT_ONLY_A_PATH.intersection(path))
    if odd:
        raise ConfigError(
            f"destination.warehouse {path} cannot be used",
            detail=f"SQLite or Spark reads {' and '.join(odd)} in a path as part of a URI or of a pattern",
            hint="Name a directory without these characters: " + " ".join(sorted(_NOT_ONLY_A_PATH)),
        )
