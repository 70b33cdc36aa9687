"""Where the lake is, and the Spark settings that make its catalog known: what follows from `DestinationConfig`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from headwater.config import CatalogType, DestinationConfig
from headwater.errors import ConfigError
from headwater.private_files import make_directory, make_file
from headwater.secret import revealed

_NOT_ONLY_A_PATH = frozenset("%?#*[]{}\\")
EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
_BUSY_TIMEOUT_MS = 30_000


def warehouse_path(destination: DestinationConfig) -> Path | None:
    """The warehouse as a directory of this machine, if it is one."""
    parts = urlsplit(destination.warehouse)
    if parts.scheme == "file":
        return Path(parts.path).absolute()
    return None if parts.scheme else Path(destination.warehouse).absolute()


def location(destination: DestinationConfig) -> str:
    """The warehouse as catalogs understand it: absolute, or a URI."""
    path = warehouse_path(destination)
    return destination.warehouse.rstrip("/") if path is None else str(path)


def spark_catalog(destination: DestinationConfig) -> dict[str, str]:
    """The Spark settings that make the catalog known under its name."""
    catalog = destination.catalog
    prefix = f"spark.sql.catalog.{catalog.name}"
    settings = {
        "spark.sql.extensions": EXTENSIONS,
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        # A cached table would hide what another session has committed.
        f"{prefix}.cache-enabled": "false",
    }
    if catalog.type is CatalogType.SQLITE:
        properties = _embedded_catalog(location(destination))
    else:
        properties = {"type": catalog.type.value} | ({"uri": catalog.uri} if catalog.uri is not None else {})
        properties |= revealed(catalog.properties)
    settings |= {f"{prefix}.{key}": value for key, value in properties.items()}
    settings.setdefault(f"{prefix}.warehouse", location(destination))
    return settings


def prepare_warehouse(destination: DestinationConfig) -> None:
    """Make the directory of the embedded catalog and its file, closed to other users; what is there keeps its mode."""
    path = warehouse_path(destination)
    if path is not None:
        _check_path(str(path))
    if path is not None and destination.catalog.type is CatalogType.SQLITE:
        make_directory(path)
        # SQLite would make it readable by all. An empty file is an empty database.
        make_file(path / "catalog.db")


def _embedded_catalog(location: str) -> dict[str, str]:
    # SQLite lets one writer in at a time; the others wait here instead of failing with SQLITE_BUSY.
    return {
        "type": "jdbc",
        "uri": f"jdbc:sqlite:file:{location}/catalog.db?busy_timeout={_BUSY_TIMEOUT_MS}",
        "jdbc.schema-version": "V1",
        "warehouse": location,
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
