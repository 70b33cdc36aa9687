"""A pipeline without Spark in a process of its own, into a file, with a point to die at.

python -m tests.integration.engine_process pipeline.toml destination.db TABLE_OID PHASE MOMENT
"""

from __future__ import annotations

import sys
from pathlib import Path

from headwater.config import load_settings
from headwater.engine.pipeline import Pipeline
from headwater.schema.table import TableId
from headwater.states import Phase
from headwater.testing.faults import FaultPoint, Moment
from tests.file_destination import FileDestination


def main() -> None:
    settings_file, destination, table, phase, moment = sys.argv[1:]
    config = load_settings(Path(settings_file)).pipeline
    point = FaultPoint(TableId(int(table)), Phase(phase), Moment(moment))
    store = point.store(config.pg_connection.connect_settings("headwater_store"), config.id)
    pipeline = Pipeline(config, store, FileDestination(Path(destination)), progress=point.progress())
    pipeline.start()
    pipeline.wait()


if __name__ == "__main__":
    main()
