"""The session settings that every session of ours starts with, whichever client opens it."""

from __future__ import annotations

from types import MappingProxyType

# They change how values look as text, what our statements mean, or end a session that holds a lock or an exported snapshot.
PINNED = MappingProxyType(
    {
        "client_encoding": "UTF8",
        "DateStyle": "ISO, MDY",
        "IntervalStyle": "postgres",
        "TimeZone": "UTC",
        "extra_float_digits": "3",
        "bytea_output": "hex",
        "statement_timeout": "0",
        "lock_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        # Names in text (regclass, row filters) are printed for this path, in copy and stream alike.
        "search_path": "pg_catalog",
        # A policy that would hide rows is an error.
        "row_security": "off",
        # Else a backslash in a name would end the literal that the name stands in, and what follows would be SQL of the owner's.
        "standard_conforming_strings": "on",
        "default_transaction_isolation": "read committed",
    }
)
# Unknown to older servers, which refuse a startup packet that names them: (first version, setting).
PINNED_SINCE = ((140000, "idle_session_timeout"), (170000, "transaction_timeout"))
RESTRICTED_SINCE = 140000
# A view in a table's place would run its owner's functions as our role. Known to 14.13, 15.8, 16.4 and every 17; a server
# that does not know it is asked nothing. (Catalog views are no matter: it concerns what users made.)
RESTRICTED = """SELECT pg_catalog.set_config('restrict_nonsystem_relation_kind', 'view, foreign-table', false)
    WHERE pg_catalog.current_setting('restrict_nonsystem_relation_kind', true) IS NOT NULL"""
