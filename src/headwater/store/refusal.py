"""What to do about a statement that the store's server refused, with the statement to run where it is a right."""

from __future__ import annotations

import psycopg

from headwater.schema.table import quote_identifier
from headwater.source.session import Connection

_RIGHTS = """
SELECT current_user::text, current_database()::text,
       (SELECT has_schema_privilege(oid, 'CREATE') AND has_schema_privilege(oid, 'USAGE')
        FROM pg_namespace WHERE nspname = 'headwater'),
       has_database_privilege(current_database(), 'CREATE')
"""
_ELSEWHERE = "or set store_pg_connection to a database it may write to"


def refusal_hint(state: str, connection: Connection) -> str:
    if state == "42501":
        return _missing_right(connection)
    if state in ("42P01", "42703", "3F000"):
        return "Call start() first, which creates the tables. If they were dropped, the state is lost: run `headwater resync`."
    return "See the server's log around this time."


def _missing_right(connection: Connection) -> str:
    """Asked in a statement of its own: what the server said is in the language of the server."""
    try:
        row = connection.execute(_RIGHTS).fetchone()
    except psycopg.Error:
        row = None
    if row is None:
        return f"Grant the connection's role CREATE on the database, {_ELSEWHERE}."
    role, database, in_namespace, in_database = row
    to = f"TO {quote_identifier(role)};"
    if in_namespace is None and not in_database:
        return f"Run GRANT CREATE ON DATABASE {quote_identifier(database)} {to}, {_ELSEWHERE}."
    if in_namespace is False:
        return f"Run GRANT USAGE, CREATE ON SCHEMA headwater {to}, {_ELSEWHERE}."
    return f"Run GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA headwater {to}, {_ELSEWHERE}."
