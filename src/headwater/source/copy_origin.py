"""Where a copy reads from, as a value that can travel to an executor. Opens no connection."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.schema.table import ColumnSchema
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls import with_contents

# To the microsecond, and so a name for one run of one server, which every role may ask for. The system identifier is
# neither: a promoted standby shares it, and some providers hide it.
SERVER_STARTED_AT = "SELECT extract(epoch FROM pg_postmaster_start_time())::text AS server_started_at"


@dataclass(frozen=True, slots=True)
class CopyOrigin:
    """All that an executor needs beside the ranges. Its repr shows no password."""

    settings: ConnectSettings
    snapshot_name: str
    server_started_at: str
    """An exported snapshot means nothing to another server, nor to the same one after a restart."""
    columns: tuple[ColumnSchema, ...]

    def portable(self) -> CopyOrigin:
        """Executors may have none of the driver's files: certificates and keys travel as text, beside the password."""
        return replace(self, settings=with_contents(self.settings))
