"""Where a session ends up: IPv6, Unix sockets, several hosts, and a failover, for each way one is opened."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import trustme

from headwater.errors import AuthenticationError, ConnectError, ConnectionLost, HeadwaterError, Retry, TlsError
from headwater.secret import Secret
from headwater.source.lock import PipelineLock
from headwater.source.session import connect
from headwater.store.connection import StoreConnection
from headwater.testing.postgres import PostgresServer
from headwater.testing.server_files import DEFAULT_HBA, ServerTls
from headwater.testing.standby import promote, standby_of
from headwater.wire.connection import WireConnection
from headwater.wire.settings import ConnectSettings, TargetSessionAttrs
from headwater.wire.tls_config import TlsConfig, TlsMode
from tests.integration.connection_kinds import Ask, by_psycopg, by_replication, by_wire, each_connection_kind

WHERE = "select current_setting('port')"
OVER = "select case when inet_server_addr() is null then 'unix' else host(inet_server_addr()) end"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Pair:
    """A primary and its standby, which share their passwords."""

    primary: PostgresServer
    standby: PostgresServer

    def settings(self, *servers: PostgresServer | str, wanted: TargetSessionAttrs | None = None) -> ConnectSettings:
        hosts = [one if isinstance(one, str) else f"127.0.0.1:{one.port}" for one in servers]
        return self.primary.settings(host=",".join(hosts), target_session_attrs=wanted)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with PostgresServer.start() as primary, standby_of(primary) as standby:
        yield Pair(primary, standby)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ipv6_server(authority: trustme.CA) -> Iterator[PostgresServer]:
    shown = authority.issue_cert("::1")
    tls = ServerTls(shown.cert_chain_pems[0].bytes().decode(), shown.private_key_pem.bytes().decode())
    hba = (*DEFAULT_HBA, "hostssl all,replication all ::1/128 scram-sha-256")
    with PostgresServer.start(settings={"listen_addresses": "127.0.0.1, ::1"}, hba=hba, tls=tls) as server:
        yield server


@pytest.mark.promise("IPv6 and Unix sockets")
@each_connection_kind
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")
@pytest.mark.parametrize("host", ["::1", "[::1]", "[::1]:{port}", "[::1]:1,[::1]:{port}"])
def test_a_server_is_reached_by_ipv6_and_its_certificate_is_for_the_address(
    ask: Ask, host: str, ipv6_server: PostgresServer, authority: trustme.CA
) -> None:
    tls = TlsConfig(mode=TlsMode.VERIFY_FULL, trusted_root_certs=authority.cert_pem.bytes().decode())
    settings = ipv6_server.settings(host=host.format(port=ipv6_server.port), tls=tls)
    if "{port}" in host:
        settings = replace(settings, port=1)
    assert ask(settings, OVER) == "::1"
    with pytest.raises(TlsError, match="another host name"):
        ask(ipv6_server.settings(tls=tls), OVER)


@pytest.mark.promise("IPv6 and Unix sockets")
@each_connection_kind
def test_a_unix_socket_may_stand_among_the_hosts(ask: Ask, pair: Pair) -> None:
    assert ask(pair.primary.settings(tcp=False), OVER) == "unix"
    nowhere = f"127.0.0.1:{unused_port()}"
    assert ask(pair.primary.settings(tcp=False, host=f"{nowhere},{pair.primary.host}"), OVER) == "unix"


@pytest.mark.promise("Several hosts, and a failover between them")
@each_connection_kind
def test_hosts_are_tried_in_order_and_one_that_is_down_is_passed_over(ask: Ask, pair: Pair) -> None:
    down, unknown = f"127.0.0.1:{unused_port()}", "no-such-host.invalid"
    any_of = TargetSessionAttrs.ANY
    assert ask(pair.settings(pair.standby, pair.primary, wanted=any_of), WHERE) == str(pair.standby.port)
    assert ask(pair.settings(pair.primary, pair.standby, wanted=any_of), WHERE) == str(pair.primary.port)
    assert ask(pair.settings(down, unknown, pair.standby, wanted=any_of), WHERE) == str(pair.standby.port)


@pytest.mark.promise("Several hosts, and a failover between them")
@each_connection_kind
@pytest.mark.parametrize("standby_first", [True, False])
@pytest.mark.parametrize(
    ("wanted", "reached"),
    [
        (None, "primary"),
        (TargetSessionAttrs.PRIMARY, "primary"),
        (TargetSessionAttrs.READ_WRITE, "primary"),
        (TargetSessionAttrs.STANDBY, "standby"),
        (TargetSessionAttrs.READ_ONLY, "standby"),
        (TargetSessionAttrs.PREFER_STANDBY, "standby"),
    ],
)
def test_the_wanted_server_is_found_wherever_it_stands(
    ask: Ask, pair: Pair, wanted: TargetSessionAttrs | None, reached: str, standby_first: bool
) -> None:
    servers = [pair.primary, pair.standby]
    settings = pair.settings(*(reversed(servers) if standby_first else servers), wanted=wanted)
    assert ask(settings, WHERE) == str(getattr(pair, reached).port)


@pytest.mark.promise("Several hosts, and a failover between them")
@each_connection_kind
def test_a_standby_that_is_only_preferred_may_be_missing(ask: Ask, pair: Pair) -> None:
    down = f"127.0.0.1:{unused_port()}"
    settings = pair.settings(down, pair.primary, wanted=TargetSessionAttrs.PREFER_STANDBY)
    assert ask(settings, WHERE) == str(pair.primary.port)


@pytest.mark.promise("Several hosts, and a failover between them")
@each_connection_kind
def test_a_read_only_primary_is_not_read_write(ask: Ask, pair: Pair) -> None:
    name = pair.primary.create_database()
    with pair.primary.connect() as connection:
        connection.execute(f"alter database {name} set default_transaction_read_only = on")
    try:
        settings = pair.primary.settings(name)
        assert ask(replace(settings, target_session_attrs=TargetSessionAttrs.PRIMARY), WHERE)
        assert ask(replace(settings, target_session_attrs=TargetSessionAttrs.READ_ONLY), WHERE)
        with pytest.raises(ConnectError, match="is a primary that is read-only") as caught:
            ask(replace(settings, target_session_attrs=TargetSessionAttrs.READ_WRITE), WHERE)
        assert caught.value.retry is Retry.TIMED
    finally:
        pair.primary.drop_database(name)


@pytest.mark.promise("Several hosts, and a failover between them")
@each_connection_kind
def test_when_no_host_will_do_each_ones_reason_is_told(ask: Ask, pair: Pair) -> None:
    port = unused_port()
    settings = pair.settings(f"127.0.0.1:{port}", "no-such-host.invalid", pair.standby)
    with pytest.raises(ConnectError, match="none of the servers") as caught:
        ask(settings, WHERE)
    for told in (f"127.0.0.1:{port}", "no-such-host.invalid", f"127.0.0.1:{pair.standby.port} is a standby", "primary"):
        assert told in caught.value.detail
    assert caught.value.hint
    # A failover may be under way.
    assert caught.value.retry is Retry.TIMED
    assert settings.password is not None
    assert settings.password.reveal() not in str(caught.value)


@pytest.mark.promise("Several hosts, and a failover between them")
@each_connection_kind
def test_a_host_that_refuses_us_ends_the_search(ask: Ask, pair: Pair) -> None:
    settings = replace(pair.settings(pair.standby, pair.primary), password=Secret("wrong"))
    with pytest.raises(AuthenticationError) as caught:
        ask(settings, WHERE)
    assert f":{pair.standby.port}" in caught.value.message


@pytest.mark.promise("Several hosts, and a failover between them")
def test_after_a_failover_every_way_reaches_the_new_primary() -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(PostgresServer.start())
        standby = stack.enter_context(standby_of(primary))
        settings = Pair(primary, standby).settings(primary, standby)
        lock, store = PipelineLock(settings, 1), StoreConnection(settings, "store")
        lock.acquire()
        stack.callback(lock.release)
        stack.callback(store.close)
        wire = stack.enter_context(WireConnection.connect(settings, replication=True))
        session = stack.enter_context(connect(settings))
        assert store.use(port_of) == primary.port

        primary.stop("immediate")
        with pytest.raises(ConnectionLost):
            wire.query(WHERE)
        with pytest.raises(HeadwaterError):
            lock.check()
        assert session.info.host == "127.0.0.1"
        for ask in (by_wire, by_replication, by_psycopg):
            with pytest.raises(ConnectError, match="none of the servers"):
                ask(settings, WHERE)

        promote(standby)
        for ask in (by_wire, by_replication, by_psycopg):
            assert ask(settings, WHERE) == str(standby.port)
        assert store.use(port_of) == standby.port
        lock.release()
        lock.acquire()
        lock.check()


def port_of(connection: object) -> int:
    row = connection.execute(WHERE).fetchone()  # type: ignore[attr-defined]
    return int(row[0])
