"""TLS in every mode, client certificates, and what a refusal says, for each way a session is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from pyspark.sql import SparkSession

from headwater.config import PgConnectionConfig, TlsConfig
from headwater.errors import AuthenticationError, HeadwaterError, TlsError
from headwater.schema.table import TableId
from headwater.secret import Secret
from headwater.source.copy_origin import CopyOrigin
from headwater.source.copy_plan import SmallTable
from headwater.spark import small_tables
from headwater.store.postgres import PostgresStore
from headwater.testing.postgres import PostgresServer
from headwater.testing.server_files import TRUSTED_SOCKET, ServerTls
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls import with_contents
from headwater.wire.tls_config import TlsMode
from tests.conftest import fresh_database
from tests.integration.connection_kinds import Ask, each_connection_kind
from tests.integration.memory_tables import MemoryTables
from tests.integration.running_pipeline import running

IN_TLS = "select case when ssl then 'tls' else 'plain' end from pg_stat_ssl where pid = pg_backend_pid()"
WHO_SHOWED_WHAT = "select client_dn from pg_stat_ssl where pid = pg_backend_pid()"
HBA = (
    TRUSTED_SOCKET,
    "hostssl all,replication by_cert all cert",
    "hostssl all,replication by_both all scram-sha-256 clientcert=verify-full",
    "hostssl all,replication by_any_cert all trust clientcert=verify-ca",
    "hostssl all,replication all 127.0.0.1/32 scram-sha-256",
)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def servers(authority: trustme.CA) -> Iterator[Callable[[int], PostgresServer]]:
    """A server of a version, started when asked for. It shows a certificate for localhost only, so 127.0.0.1 is the wrong
    name; TCP without TLS is refused."""
    shown = authority.issue_cert("localhost")
    tls = ServerTls(shown.cert_chain_pems[0].bytes().decode(), key_of(shown), client_roots=roots_of(authority))
    with ExitStack() as stack:

        @cache
        def start(version: int) -> PostgresServer:
            server = stack.enter_context(PostgresServer.start(version=version, tls=tls, hba=HBA))
            with server.connect() as connection:
                for role in ("by_cert", "by_both", "by_any_cert"):
                    connection.execute(f"create role {role} login replication password 'pw'")
            return server

        yield start


@pytest.fixture
def server(servers: Callable[[int], PostgresServer], pg_version: int) -> PostgresServer:
    return servers(pg_version)


@pytest.fixture(scope="module")
def plain_server() -> Iterator[PostgresServer]:
    with PostgresServer.start() as server:
        yield server


def roots_of(authority: trustme.CA) -> str:
    return authority.cert_pem.bytes().decode()


def key_of(issued: trustme.LeafCert) -> str:
    return issued.private_key_pem.bytes().decode()


def showing(authority: trustme.CA, name: str, mode: TlsMode = TlsMode.REQUIRE) -> TlsConfig:
    """TLS settings with a client certificate for this common name."""
    issued = authority.issue_cert(f"{name}@example.com", common_name=name)
    return TlsConfig(
        mode=mode,
        client_cert=issued.cert_chain_pems[0].bytes().decode(),
        client_key=Secret(key_of(issued)),
    )


def by_role(server: PostgresServer, role: str, tls: TlsConfig) -> ConnectSettings:
    return server.settings(username=role, password=Secret("pw") if role == "by_both" else None, tls=tls)


def assert_says_what_to_do(error: HeadwaterError) -> None:
    assert error.message
    assert error.detail
    assert error.hint


@pytest.mark.promise("Each TLS mode, verify-ca and verify-full told apart")
@each_connection_kind
@pytest.mark.parametrize("as_file", [True, False], ids=["path", "text"])
@pytest.mark.parametrize("mode", list(TlsMode))
def test_every_mode_reaches_the_right_server(
    server: PostgresServer,
    plain_server: PostgresServer,
    authority: trustme.CA,
    tmp_path: Path,
    ask: Ask,
    mode: TlsMode,
    as_file: bool,
) -> None:
    roots = tmp_path / "roots.pem"
    roots.write_text(roots_of(authority))
    settings = server.settings(
        host="localhost", tls=TlsConfig(mode=mode, trusted_root_certs=str(roots) if as_file else roots_of(authority))
    )
    if mode is TlsMode.DISABLE:
        assert ask(plain_server.settings(host="localhost", tls=settings.tls), IN_TLS) == "plain"
        with pytest.raises(AuthenticationError):
            ask(settings, IN_TLS)
    else:
        assert ask(settings, IN_TLS) == "tls"


@pytest.mark.promise("Each TLS mode, verify-ca and verify-full told apart")
@pytest.mark.versions
@each_connection_kind
def test_verify_ca_accepts_another_name_and_verify_full_refuses_it(
    server: PostgresServer, authority: trustme.CA, ask: Ask
) -> None:
    for mode in (TlsMode.REQUIRE, TlsMode.VERIFY_CA):
        assert ask(server.settings(tls=TlsConfig(mode=mode, trusted_root_certs=roots_of(authority))), IN_TLS) == "tls"
    with pytest.raises(TlsError, match="is for another host name") as caught:
        ask(server.settings(tls=TlsConfig(mode=TlsMode.VERIFY_FULL, trusted_root_certs=roots_of(authority))), IN_TLS)
    assert_says_what_to_do(caught.value)
    assert "verify-ca" in caught.value.hint


@pytest.mark.promise("Each TLS mode, verify-ca and verify-full told apart")
@each_connection_kind
@pytest.mark.parametrize("mode", [TlsMode.REQUIRE, TlsMode.VERIFY_CA, TlsMode.VERIFY_FULL])
@pytest.mark.parametrize("trusted", ["a stranger", "the system"])
def test_a_certificate_that_no_trusted_root_signed_is_refused(
    server: PostgresServer, ask: Ask, mode: TlsMode, trusted: str
) -> None:
    roots = roots_of(trustme.CA()) if trusted == "a stranger" else None
    settings = server.settings(host="localhost", tls=TlsConfig(mode=mode, trusted_root_certs=roots))
    if roots is None and mode is TlsMode.REQUIRE:
        # As in libpq: without roots of one's own, require protects from listeners and not from impostors.
        assert ask(settings, IN_TLS) == "tls"
        return
    with pytest.raises(TlsError, match="is not trusted") as caught:
        ask(settings, IN_TLS)
    assert_says_what_to_do(caught.value)
    assert "tls.trusted_root_certs" in caught.value.hint


@pytest.mark.promise("Each TLS mode, verify-ca and verify-full told apart")
@each_connection_kind
def test_a_server_without_tls_is_refused_where_tls_is_required(plain_server: PostgresServer, ask: Ask) -> None:
    assert ask(plain_server.settings(tls=TlsConfig(mode=TlsMode.PREFER)), IN_TLS) == "plain"
    with pytest.raises(TlsError, match="does not offer TLS") as caught:
        ask(plain_server.settings(tls=TlsConfig(mode=TlsMode.REQUIRE)), IN_TLS)
    assert_says_what_to_do(caught.value)


@pytest.mark.promise("Client certificates")
@pytest.mark.versions
@each_connection_kind
@pytest.mark.parametrize("given", ["text", "paths", "encrypted key"])
def test_a_client_certificate_is_enough_where_the_server_asks_for_one(
    server: PostgresServer, authority: trustme.CA, tmp_path: Path, ask: Ask, given: str
) -> None:
    tls = replace(showing(authority, "by_cert", TlsMode.VERIFY_CA), trusted_root_certs=roots_of(authority))
    assert tls.client_cert is not None
    assert tls.client_key is not None
    if given == "paths":
        cert, key = tmp_path / "client.crt", tmp_path / "client.key"
        cert.write_text(tls.client_cert)
        key.touch(0o600)
        key.write_text(tls.client_key.reveal())
        tls = replace(tls, client_cert=str(cert), client_key=Secret(str(key)))
    elif given == "encrypted key":
        assert tls.client_key is not None  # which mypy forgets where `tls` was given another value
        key_password = Secret('key\'s "password" %')
        tls = replace(tls, client_key=encrypted(tls.client_key, key_password), client_key_password=key_password)
    settings = by_role(server, "by_cert", tls)
    assert ask(settings, WHO_SHOWED_WHAT).endswith("CN=by_cert")
    sent_to_an_executor = with_contents(settings)
    for path in tmp_path.iterdir():
        path.unlink()
    assert ask(sent_to_an_executor, WHO_SHOWED_WHAT).endswith("CN=by_cert")


def encrypted(key: Secret, password: Secret) -> Secret:
    encryption = BestAvailableEncryption(password.reveal().encode())
    loaded = load_pem_private_key(key.reveal().encode(), None)
    return Secret(loaded.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption).decode())


@pytest.mark.promise("Client certificates")
@pytest.mark.versions
@each_connection_kind
def test_a_server_may_ask_for_a_certificate_and_a_password(
    server: PostgresServer, authority: trustme.CA, ask: Ask
) -> None:
    settings = by_role(server, "by_both", showing(authority, "by_both"))
    assert ask(settings, WHO_SHOWED_WHAT).endswith("CN=by_both")
    with pytest.raises(AuthenticationError) as wrong_password:
        ask(replace(settings, password=Secret("not it")), IN_TLS)
    with pytest.raises(AuthenticationError) as wrong_name:
        ask(by_role(server, "by_both", showing(authority, "somebody")), IN_TLS)
    for caught in (wrong_password, wrong_name):
        assert_says_what_to_do(caught.value)
        assert "certificate" in caught.value.hint
        assert "not it" not in str(caught.value)


@pytest.mark.promise("Client certificates")
@pytest.mark.versions
@each_connection_kind
def test_a_missing_wrong_or_untrusted_client_certificate_is_reported(
    server: PostgresServer, authority: trustme.CA, ask: Ask
) -> None:
    for role in ("by_cert", "by_any_cert"):
        with pytest.raises(AuthenticationError, match="requires a client certificate") as missing:
            ask(by_role(server, role, TlsConfig(mode=TlsMode.REQUIRE)), IN_TLS)
        assert_says_what_to_do(missing.value)
        assert "tls.client_cert" in missing.value.hint
        with pytest.raises(TlsError, match="ended the TLS handshake") as strange:
            ask(by_role(server, role, showing(trustme.CA(), role)), IN_TLS)
        assert_says_what_to_do(strange.value)
        assert "ssl_ca_file" in strange.value.hint
    assert ask(by_role(server, "by_any_cert", showing(authority, "somebody")), IN_TLS) == "tls"
    with pytest.raises(AuthenticationError) as wrong:
        ask(by_role(server, "by_cert", showing(authority, "somebody")), IN_TLS)
    assert_says_what_to_do(wrong.value)


@pytest.mark.promise("Client certificates")
@each_connection_kind
def test_a_client_certificate_that_cannot_be_used_is_reported_before_anything_is_sent(
    server: PostgresServer, plain_server: PostgresServer, authority: trustme.CA, tmp_path: Path, ask: Ask
) -> None:
    good = showing(authority, "by_cert")
    assert good.client_key is not None
    key = tmp_path / "client.key"
    key.write_text(good.client_key.reveal())
    key.chmod(0o644)
    locked = encrypted(good.client_key, Secret("opens it"))
    broken = {
        "is readable by other users": replace(good, client_key=Secret(str(key))),
        "No such file": replace(good, client_key=Secret(str(tmp_path / "nowhere"))),
        "MISMATCH": replace(good, client_key=showing(authority, "another").client_key),
        "could not be loaded": replace(good, client_key=locked),
        "client certificate": replace(good, client_key=locked, client_key_password=Secret("does not open it")),
    }
    for told, tls in broken.items():
        with pytest.raises(TlsError) as caught:
            ask(by_role(server, "by_cert", tls), IN_TLS)
        assert_says_what_to_do(caught.value)
        assert told in str(caught.value)
        for secret in ("PRIVATE KEY", "does not open it"):
            assert secret not in str(caught.value)
        with pytest.raises(TlsError):
            ask(plain_server.settings(tls=replace(tls, mode=TlsMode.PREFER)), IN_TLS)


@pytest.mark.promise("Client certificates")
@pytest.mark.versions
def test_a_whole_pipeline_runs_with_a_client_certificate_over_a_list_of_hosts(
    server: PostgresServer, authority: trustme.CA, tmp_path: Path
) -> None:
    shown = showing(authority, "by_cert")
    assert shown.client_cert is not None
    assert shown.client_key is not None
    for name, text in {
        "roots": roots_of(authority),
        "crt": shown.client_cert,
        "key": shown.client_key.reveal(),
    }.items():
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(text)
    with fresh_database(server) as database:
        connection = PgConnectionConfig(
            host=f"no-such-host.invalid,localhost:{server.port}",
            name=database.name,
            username="by_cert",
            tls=TlsConfig(
                mode=TlsMode.VERIFY_FULL,
                trusted_root_certs=str(tmp_path / "roots"),
                client_cert=str(tmp_path / "crt"),
                client_key=Secret(str(tmp_path / "key")),
            ),
        )
        database.execute(
            f"grant create on database {database.name} to by_cert; create table t (id int primary key, v text);"
            "insert into t select i, 'copied' from generate_series(1, 100) i; create publication shop for table t;"
            "grant select on t to by_cert"
        )
        destination = MemoryTables()
        for turn in range(2):
            store = PostgresStore(connection.connect_settings(), 1)
            with running(database, destination, store, pg_connection=connection) as run:
                run.wait_states("ready", 1)
                database.execute("update t set v = v || %s where id <= 10", [str(turn)])
                run.wait_caught_up()
                run.assert_equal("t")
                run.stop()
        assert destination.copies == ["t"]


class _Sent(Exception):
    """Instead of a Spark job: what its tasks would be made of."""

    def __init__(self, tasks: list[list[SmallTable]]) -> None:
        self.tasks = tasks


def test_security_small_tables_sent_to_executors_in_one_job_carry_texts_in_place_of_files(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "roots").write_text(roots_of(authority))
    tls = TlsConfig(mode=TlsMode.VERIFY_FULL, trusted_root_certs=str(tmp_path / "roots"))
    origin = CopyOrigin(ConnectSettings("db", 5432, "shop", "reader", tls=tls), "snapshot", "started", ())

    def reader(tasks: list[list[SmallTable]], budget_bytes: int) -> None:
        raise _Sent(tasks)

    monkeypatch.setattr(small_tables, "_reader", reader)
    with pytest.raises(_Sent) as sent:
        small_tables.read_in_one_job(cast(SparkSession, None), [SmallTable(TableId(1), origin, ())], 1, 1)
    ((table,),) = sent.value.tasks
    assert table.origin.settings.tls.root_certs == roots_of(authority)


@pytest.mark.promise("Client certificates")
def test_settings_sent_to_an_executor_carry_texts_in_place_of_files(authority: trustme.CA, tmp_path: Path) -> None:
    tls = showing(authority, "by_cert", TlsMode.VERIFY_FULL)
    assert tls.client_cert is not None
    assert tls.client_key is not None
    files = {"roots": roots_of(authority), "cert": tls.client_cert, "key": tls.client_key.reveal()}
    for name, text in files.items():
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(text)
    roots, cert, key = (str(tmp_path / name) for name in files)
    given = ConnectSettings(
        "db",
        5432,
        "shop",
        "reader",
        tls=TlsConfig(mode=tls.sslmode, trusted_root_certs=roots, client_cert=cert, client_key=Secret(key)),
    )
    assert with_contents(given).tls == replace(tls, trusted_root_certs=roots_of(authority))
    assert "PRIVATE KEY" not in repr(with_contents(given))
