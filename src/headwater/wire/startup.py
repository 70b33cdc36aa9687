"""The session settings that every session of ours starts with."""

from __future__ import annotations

from types import MappingProxyType

# They change how values look as text, or end a session that holds a lock or an exported snapshot.
PINNED = MappingProxyType(
    {
        "client_encoding": "UTF8",
        "DateStyle": "ISO",
        "IntervalStyle": "postgres",
        "TimeZone": "UTC",
        "extra_float_digits": "3",
        "bytea_output": "hex",
        "statement_timeout": "0",
        "lock_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        # Names in text (regclass, row filters) are printed for this path, in copy and stream alike.
        "search_path": "pg_catalog",
    }
)
# Unknown to older servers, which refuse a startup packet that names them: (first version, setting).
PINNED_SINCE = ((140000, "idle_session_timeout"), (170000, "transaction_timeout"))
