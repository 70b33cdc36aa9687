"""Reading present rows from the source for a destination that met a value nobody else has (invariant 12)."""

from __future__ import annotations

import logging

import pyarrow as pa

from headwater.events import SourceRead
from headwater.schema.table import ReplicatedTableSchema
from headwater.source.rows import read_rows
from headwater.source.session import connect
from headwater.wire.settings import ConnectSettings

log = logging.getLogger(__name__)


class SourceRows:
    """Opens a session only when asked; the log says how many rows were read."""

    def __init__(self, settings: ConnectSettings) -> None:
        self._settings = settings

    def read(self, schema: ReplicatedTableSchema, keys: pa.Table) -> SourceRead:
        with connect(self._settings, application_name="headwater_reread") as connection:
            read = read_rows(connection, schema, keys)
        log.info("read %d rows of %s from the source for unchanged values", keys.num_rows, schema.name)
        return read
