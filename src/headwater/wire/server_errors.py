"""What the server's ErrorResponse means to us: a class of our error tree, and what to do next.

Decided by SQLSTATE and by the routine that raised it, never by the text, which comes in the server's language; only the
name of pg_hba.conf is the same in each. The server's own words are kept in the detail. Statements are not: they may hold
secrets.
"""

from __future__ import annotations

import re

from headwater.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLost,
    HeadwaterError,
    PrivilegeError,
    PublicationMissing,
    Retry,
    ServerError,
    SlotError,
    SourceSettingsError,
    values_are_shown,
)
from headwater.wire.commands import identifier
from headwater.wire.messages import ErrorFields
from headwater.wire.settings import ConnectSettings

_COMMON_NAME = "For a client certificate: its common name must be the role's, or be mapped to it in pg_ident.conf."

# Transient by their nature: serialization, deadlock, resources, a server that is recovering.
_TIMED_CLASSES = ("40", "53", "58")


def to_error(
    fields: ErrorFields, settings: ConnectSettings, *, starting: bool = False, slot: str | None = None
) -> HeadwaterError:
    """`starting`: the session was not open yet. `slot`: the slot that the command named, if any."""
    if starting:
        error = _starting(fields, settings)
        if error is not None:
            return error
    error = _slot(fields, slot) or _general(fields, settings)
    return error if error is not None else _other(fields)


def _starting(fields: ErrorFields, settings: ConnectSettings) -> HeadwaterError | None:
    match fields.sqlstate:
        case "28P01":
            return AuthenticationError(
                f'password of role "{settings.username}" was not accepted at {settings.address}',
                detail=_words(fields),
                hint=f"Check it; a new one is set with: ALTER ROLE {identifier(settings.username)} PASSWORD '...'"
                # With clientcert=verify-full the server reports a certificate of another name in the same words.
                + (f" {_COMMON_NAME}" if settings.tls.client_cert is not None else ""),
            )
        case "28000":
            return _not_admitted(fields, settings)
        case "3D000":
            return ConnectError(
                f'database "{settings.database}" does not exist at {settings.address}',
                detail=_words(fields),
                hint="Check the database's name; `SELECT datname FROM pg_database` lists them.",
                retry=Retry.NEVER,
            )
        case "57P03" | "57P01" | "57P02":
            return ConnectError(
                f"server at {settings.address} takes no connections at the moment",
                detail=_words(fields),
                hint="The server is starting, stopping or recovering; this is retried. If it continues, see the server's log.",
            )
        case "53300":
            return ConnectError(
                f"server at {settings.address} has no free connection",
                detail=_words(fields),
                hint="Raise max_connections (max_wal_senders for replication), or end sessions that are not needed.",
            )
    return None


def _not_admitted(fields: ErrorFields, settings: ConnectSettings) -> HeadwaterError:
    role, address = settings.username, settings.address
    if fields.routine == "InitializeSessionUserId":
        return AuthenticationError(
            f'role "{role}" may not log in at {address}',
            detail=_words(fields),
            hint=f"Create it with: CREATE ROLE {identifier(role)} LOGIN REPLICATION PASSWORD '...'",
        )
    # The binding is for another connection, or the server's offer of it did not reach us.
    if "client_final" in fields.routine or "client_first" in fields.routine:
        return channel_differs(settings, _words(fields))
    if fields.routine == "ClientAuthentication" and "pg_hba.conf" not in fields.message:
        return client_certificate_missing(settings, _words(fields))
    if fields.routine == "auth_failed":
        return AuthenticationError(
            f'role "{role}" could not be authenticated at {address}',
            detail=_words(fields),
            hint="The method that pg_hba.conf asks for here (peer, ident, cert, ldap ...) does not fit; "
            "use scram-sha-256 for this role, database and address."
            + (f" {_COMMON_NAME}" if settings.tls.client_cert is not None else ""),
        )
    kind = "local" if settings.is_unix_socket else "host"
    who = f"{kind}  {settings.database}  {role}" + ("" if settings.is_unix_socket else "  <our address>/32")
    return AuthenticationError(
        f'pg_hba.conf at {address} does not admit role "{role}" to database "{settings.database}"',
        detail=_words(fields),
        hint=f"Add the line `{who}  scram-sha-256` to pg_hba.conf above any rule that rejects it, "
        "then run SELECT pg_reload_conf().",
    )


def channel_differs(settings: ConnectSettings, detail: str) -> AuthenticationError:
    return AuthenticationError(
        f"the TLS connection to {settings.address} does not end at the Postgres server",
        detail=detail,
        hint="A proxy or a man in the middle terminates TLS with a certificate of its own. If it is your proxy, connect to the "
        'server directly; if not, set tls.mode = "verify-full", which refuses another certificate before anything is sent.',
    )


def client_certificate_missing(settings: ConnectSettings, detail: str) -> AuthenticationError:
    return AuthenticationError(
        f"server at {settings.address} requires a client certificate",
        detail=detail,
        hint="Set tls.client_cert and tls.client_key to a certificate that an authority in the server's ssl_ca_file signed.",
    )


def _slot(fields: ErrorFields, slot: str | None) -> HeadwaterError | None:
    in_slot_code = "ReplicationSlot" in fields.routine or "replication_slot" in fields.routine
    name = f'replication slot "{slot}"' if slot is not None else "replication slot"
    match fields.sqlstate:
        case "42704" if in_slot_code:
            return SlotError(
                f"{name} does not exist",
                detail=_words(fields),
                hint="It was dropped, or the server is another one (a restored backup, a promoted standby). "
                "Compare with: SELECT slot_name, database, active FROM pg_replication_slots",
            )
        case "55006" if in_slot_code:
            return SlotError(
                f"{name} is in use by another session",
                detail=_words(fields),
                hint="If that is a session of this pipeline that hangs, end it with pg_terminate_backend(active_pid); see: "
                "SELECT slot_name, active_pid FROM pg_replication_slots",
                # A session whose client died holds the slot until wal_sender_timeout: waiting may be all it takes.
                retry=Retry.TIMED,
            )
        case "42710" if in_slot_code:
            return SlotError(
                f"{name} exists already",
                detail=_words(fields),
                hint="Use another name, or drop it if it is not needed: SELECT pg_drop_replication_slot(...)",
            )
        case "55000" if slot is not None and fields.routine != "CheckLogicalDecodingRequirements":
            return SlotError(
                f"{name} cannot serve changes",
                detail=_words(fields),
                hint="See why with: SELECT slot_name, plugin, database, wal_status FROM pg_replication_slots "
                "(a lost slot has to be created again and its tables copied again; max_slot_wal_keep_size is the limit).",
            )
        case "53400" if in_slot_code:
            return SourceSettingsError(
                "server has no free replication slot",
                detail=_words(fields),
                hint="Drop slots that are not needed (SELECT slot_name, active FROM pg_replication_slots), or raise "
                "max_replication_slots and restart the server.",
            )
    return None


def _general(fields: ErrorFields, settings: ConnectSettings) -> HeadwaterError | None:
    match fields.sqlstate:
        case "42501":
            return _lacks_right(fields, settings)
        case "55000" if fields.routine == "CheckLogicalDecodingRequirements":
            return SourceSettingsError(
                f"server at {settings.address} is not set up for logical replication",
                detail=_words(fields),
                hint="Run ALTER SYSTEM SET wal_level = logical, then restart the server.",
            )
        case "57P01" | "57P02" | "57P05" | "25P03" | "25P04":
            return ConnectionLost(
                f"server at {settings.address} ended the session",
                detail=_words(fields),
                hint="The server was stopped, or a timeout or pg_terminate_backend ended this session. Headwater reconnects by "
                "itself.",
            )
        case "57P04":
            return ConnectionLost(
                f'database "{settings.database}" was dropped',
                detail=_words(fields),
                hint="Point the pipeline at a database that exists.",
                retry=Retry.NEVER,
            )
    return None


def _lacks_right(fields: ErrorFields, settings: ConnectSettings) -> PrivilegeError:
    role = settings.username
    # The walsender's checks moved between routines over the versions; these two names cover 14 to 18.
    if fields.routine in ("InitPostgres", "CheckSlotPermissions", "check_permissions"):
        return PrivilegeError(
            f'role "{role}" may not use replication at {settings.address}',
            detail=_words(fields),
            hint=f"Run as a superuser: ALTER ROLE {identifier(role)} REPLICATION "
            "(on managed servers, grant the provider's replication role instead).",
        )
    return PrivilegeError(
        f'role "{role}" lacks a right at {settings.address}',
        detail=_words(fields),
        hint=fields.hint or f"Grant it, for example: GRANT SELECT ON ALL TABLES IN SCHEMA ... TO {identifier(role)}",
    )


_UNDEFINED_OBJECT, _PUBLICATION_ROUTINE = "42704", "get_publication_oid"


def _other(fields: ErrorFields) -> ServerError:
    message, detail = without_values(fields.sqlstate, fields.message, fields.detail)
    is_publication = fields.sqlstate == _UNDEFINED_OBJECT and fields.routine == _PUBLICATION_ROUTINE
    return (PublicationMissing if is_publication else ServerError)(
        message,
        sqlstate=fields.sqlstate,
        detail=f"{fields.severity} {fields.sqlstate}" + (f": {detail}" if detail else ""),
        hint=fields.hint or _hint(fields),
        retry=Retry.TIMED if fields.sqlstate[:2] in _TIMED_CLASSES else Retry.NEVER,
    )


def _hint(fields: ErrorFields) -> str:
    match fields.sqlstate:
        case "57014":
            return "pg_cancel_backend or a timeout cancelled the statement; run it again."
        case state if state == _UNDEFINED_OBJECT:
            return "Create the object that is named, or correct the name; publications are listed in pg_publication."
        case state if state.startswith("22"):
            return f"{_look_in_log(state)} {_ROW_FILTER}"
        case state if state.startswith("XX"):
            return f"An internal error of the server: a newer minor version may fix it. {_look_in_log(state)} {_ROW_FILTER}"
    return _look_in_log(fields.sqlstate)


_ROW_FILTER = (
    "If it comes with every start, a row filter of the publication fails for a row: correct the filter, then, because changes "
    "are decoded with the filter as it was when they were made, have the slot created again and all tables copied again."
)


def _look_in_log(sqlstate: str) -> str:
    return f"Look for SQLSTATE {sqlstate} in the server's log, which also has the statement."


def _words(fields: ErrorFields) -> str:
    message, detail = without_values(fields.sqlstate, fields.message, fields.detail)
    parts = [f"{fields.severity} {fields.sqlstate}: {message}", detail, fields.hint]
    return "; ".join(part for part in parts if part)


def without_values(sqlstate: str, message: str, detail: str) -> tuple[str, str]:
    """The server's message without values of rows (invariant 16): messages about data quote them, details about keys show them.

    The server's log has the whole of it.
    """
    if values_are_shown():
        return message, detail
    if sqlstate.startswith("22"):
        return _QUOTED.sub('"..."', message), ""
    return message, "" if sqlstate.startswith(("23", "P0")) else detail


_QUOTED = re.compile(r'"(?:[^"]|"(?=\w))*"')
