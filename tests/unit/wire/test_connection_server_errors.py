"""Every refusal of the server becomes one class with a hint, whatever language the server speaks."""

from __future__ import annotations

import pytest

from headwater.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLost,
    HeadwaterError,
    PrivilegeError,
    Retry,
    ServerError,
    SlotError,
    SourceSettingsError,
)
from headwater.secret import Secret
from headwater.wire.messages import ErrorFields
from headwater.wire.server_errors import to_error
from headwater.wire.settings import ConnectSettings

SETTINGS = ConnectSettings("db", 5432, "shop", "reader", Secret("hunter2"))


def fields(sqlstate: str, routine: str = "", severity: str = "ERROR") -> ErrorFields:
    return ErrorFields(severity, sqlstate, "eine Meldung", "", "", routine)


CASES = [
    ("28P01", "auth_failed", True, None, AuthenticationError, Retry.NEVER, "ALTER ROLE"),
    ("28000", "ClientAuthentication", True, None, AuthenticationError, Retry.NEVER, "tls.client_cert"),
    ("28000", "InitializeSessionUserId", True, None, AuthenticationError, Retry.NEVER, "CREATE ROLE"),
    ("28000", "auth_failed", True, None, AuthenticationError, Retry.NEVER, "scram-sha-256"),
    ("3D000", "InitPostgres", True, None, ConnectError, Retry.NEVER, "pg_database"),
    ("57P03", "ProcessStartupPacket", True, None, ConnectError, Retry.TIMED, "starting"),
    ("53300", "InitProcess", True, None, ConnectError, Retry.TIMED, "max_connections"),
    ("42501", "InitPostgres", True, None, PrivilegeError, Retry.NEVER, 'ALTER ROLE "reader" REPLICATION'),
    ("42501", "CheckSlotPermissions", False, None, PrivilegeError, Retry.NEVER, "REPLICATION"),
    ("42501", "aclcheck_error", False, None, PrivilegeError, Retry.NEVER, "GRANT SELECT"),
    ("55000", "CheckLogicalDecodingRequirements", False, "s", SourceSettingsError, Retry.NEVER, "wal_level = logical"),
    ("53400", "ReplicationSlotCreate", False, "s", SourceSettingsError, Retry.NEVER, "max_replication_slots"),
    ("42704", "ReplicationSlotAcquire", False, "s", SlotError, Retry.NEVER, "pg_replication_slots"),
    ("55006", "ReplicationSlotAcquire", False, "s", SlotError, Retry.TIMED, "pg_terminate_backend"),
    ("42710", "ReplicationSlotCreate", False, "s", SlotError, Retry.NEVER, "pg_drop_replication_slot"),
    ("55000", "StartLogicalReplication", False, "s", SlotError, Retry.NEVER, "wal_status"),
    ("57P01", "ProcessInterrupts", False, None, ConnectionLost, Retry.TIMED, "reconnects"),
    ("57P04", "ProcessInterrupts", False, None, ConnectionLost, Retry.NEVER, "database"),
    ("42704", "get_publication_by_name", False, "s", ServerError, Retry.NEVER, "pg_publication"),
    ("40001", "heap_update", False, None, ServerError, Retry.TIMED, "40001"),
    ("42P01", "parserOpenTable", False, None, ServerError, Retry.NEVER, "log"),
]


@pytest.mark.parametrize(("sqlstate", "routine", "starting", "slot", "kind", "retry", "hint"), CASES)
def test_an_error_of_the_server_has_one_class_and_a_hint(
    sqlstate: str,
    routine: str,
    starting: bool,
    slot: str | None,
    kind: type[HeadwaterError],
    retry: Retry,
    hint: str,
) -> None:
    error = to_error(fields(sqlstate, routine), SETTINGS, starting=starting, slot=slot)
    assert type(error) is kind
    assert error.retry is retry
    assert hint in error.hint + error.message
    assert "hunter2" not in str(error)
    assert "eine Meldung" in str(error)


def test_a_line_that_pg_hba_lacks_is_named_in_every_language() -> None:
    words = ErrorFields("FATAL", "28000", "kein pg_hba.conf-Eintrag", "", "", "ClientAuthentication")
    error = to_error(words, SETTINGS, starting=True)
    assert isinstance(error, AuthenticationError)
    assert "does not admit role" in error.message
    assert "pg_reload_conf" in error.hint


def test_what_has_no_class_keeps_everything_the_server_said() -> None:
    error = to_error(ErrorFields("ERROR", "42883", "no such function", "a detail", "a hint", "lookup"), SETTINGS)
    assert isinstance(error, ServerError)
    assert error.sqlstate == "42883"
    assert (error.message, error.detail, error.hint) == ("no such function", "ERROR 42883: a detail", "a hint")
