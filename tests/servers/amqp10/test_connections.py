"""Logins with AMQP 1.0, and the ends of connections."""

import contextlib
import secrets
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.endpoint import EMPTY_FRAME, Closed, Opened, serial_add
from dtx.wire.amqp10.performatives import ACCEPTED, Discharge, Role, SaslCode, Source, Target, TransactionalState
from tests.servers.amqp10.raw import AMQP_HEADER, SECONDS, Raw, body
from tests.support.client import connected, take_all
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.service import DtxService
from tests.support.users import StandaloneUsers

TLS_HEADER = b"AMQP\x02\x01\x00\x00"


@pytest.fixture(scope="module")
def own(postgres: PostgresServer) -> Iterator[DtxService]:
    """A service with users of its own."""
    database = postgres.create_database()
    with DtxService(database=database) as running:
        yield running
    postgres.drop_database(database)


def closed(raw: Raw) -> str:
    """Wait until the server closes the connection, and return the error condition."""
    raw.flush()
    while True:
        for event in raw.events:
            if isinstance(event, Closed):
                assert event.error is not None
                return event.error.condition
        data = raw.socket.recv(1 << 16)
        assert data, "the server has closed the connection without a reason"
        raw.events += raw.engine.receive(data, 0.0)


def test_open_offers_the_implemented_capabilities(service: DtxService) -> None:
    """Proton's servers, for example, send replies to a target without an address only if this is offered."""
    with Raw(service) as raw:
        assert raw.expect(Opened).open.offered_capabilities == ("ANONYMOUS-RELAY",)


def test_a_wrong_password_is_refused(service: DtxService) -> None:
    with Raw(service, password="wrong") as raw:
        assert raw.login is SaslCode.AUTH
        assert raw.socket.recv(1) == b""


def test_a_client_that_skips_the_login_gets_the_sasl_header(service: DtxService) -> None:
    with socket.create_connection((service.host, service.port), SECONDS) as client:
        client.sendall(AMQP_HEADER)
        assert client.recv(100) == b"AMQP\x03\x01\x00\x00"
        assert client.recv(100) == b""


def test_tls_depends_on_the_address_not_on_a_header(service: DtxService) -> None:
    with socket.create_connection((service.host, service.port), SECONDS) as client:
        client.sendall(TLS_HEADER)
        assert client.recv(100) == b"AMQP\x00\x00\x09\x01"
        assert client.recv(100) == b""


def test_a_transaction_over_tls(postgres: PostgresServer, certificates: Path) -> None:
    database = postgres.create_database()
    options = ("--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key"))
    tls = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with DtxService(database=database, options=options) as service, Raw(service, tls=tls) as raw:
        session = raw.opened().begin()
        link, source = raw.receiver(session, None, dynamic=True)
        assert isinstance(source.address, str)
        control, sender = raw.control(session), raw.sender(session, source.address)
        txn_id = raw.declare(session, control)
        raw.post(sender, bytes(3_000_000), txn_id, settled=True)
        assert raw.discharge(session, control, txn_id) == ACCEPTED
        assert len(body(raw.take())) == 3_000_000
        raw.detach(session, link)
    postgres.drop_database(database)


@pytest.mark.parametrize(
    ("hostname", "condition"),
    [
        ("vhost:nowhere", "amqp:not-found"),
        ("vhost:" + "x" * 300, "amqp:not-found"),
        ("vhost:/", ""),
        ("/", ""),
        ("127.0.0.1", ""),
        (None, ""),
    ],
)
def test_the_hostname_selects_the_virtual_host(service: DtxService, hostname: str | None, condition: str) -> None:
    with Raw(service, hostname=hostname) as raw:
        if condition:
            assert closed(raw) == condition
        else:
            raw.opened()


def test_a_close_is_answered(service: DtxService) -> None:
    with Raw(service) as raw:
        raw.opened().begin()
        raw.close()
        assert raw.socket.recv(1) == b""


def test_a_client_gets_a_frame_before_its_idle_timeout(service: DtxService) -> None:
    """2.4.5: a peer with nothing to send "MAY send an empty frame". This client announces half a second."""
    with Raw(service, idle_seconds=1.0) as raw:
        raw.opened()
        heard = b""
        while len(heard) < 3 * len(EMPTY_FRAME):
            heard += raw.socket.recv(100)
        assert heard == EMPTY_FRAME * (len(heard) // len(EMPTY_FRAME))


def test_frames_that_are_none_close_the_connection(service: DtxService) -> None:
    with Raw(service) as raw:
        raw.opened()
        raw.socket.sendall(b"\x00\x00\x00\x04garbage")
        assert closed(raw) == "amqp:connection:framing-error"


def test_an_undecodable_message_is_rejected_alone(service: DtxService, queue: str) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        sender = raw.sender(session, queue)
        for payload in (b"\xff" * 10, b"", b"\x00\x53\x75\xb0\xff\xff\xff\xff", secrets.token_bytes(50)):
            state = raw.outcome(session, sender.send(b"bad", payload))
            assert "decode-error" in str(state)
        assert raw.outcome(session, raw.post(sender, b"good")) is not None


def test_messages_that_are_aborted_use_up_no_credit_for_good(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        sender = raw.sender(session, queue)
        for number in range(2000):
            fields = {"handle": sender.handle, "delivery_id": 10_000 + number, "delivery_tag": b"x", "aborted": True}
            raw.engine.send_transfer(session.channel, fields, memoryview(b""))
            sender.delivery_count = serial_add(sender.delivery_count, 1)
            sender.credit -= 1
            if not sender.credit:
                raw.until(lambda: sender.credit > 0)
        assert raw.outcome(session, raw.post(sender, b"good")) == ACCEPTED
    assert take_all(channel, queue) == [b"good"]


def test_unfinished_messages_count_as_memory_that_all_share(postgres: PostgresServer) -> None:
    database = postgres.create_database()
    with DtxService(database=database, options=("--max-held-bytes", "1000000")) as service:
        with connected(service.url()) as connection:
            connection.channel().queue_declare("q", durable=True)
        with Raw(service) as greedy, Raw(service) as other:
            session = greedy.opened().begin()
            sender = greedy.sender(session, "q")
            rest = memoryview(message.data(bytes(3_000_000)))
            fields: dict[str, Any] = {"handle": sender.handle, "delivery_id": 0, "delivery_tag": b"0"}
            with contextlib.suppress(OSError):
                while len(rest) > 1_000_000:
                    rest = greedy.engine.send_transfer(session.channel, fields, rest)
                    fields = {"handle": sender.handle}
                    greedy.flush()
            assert closed(greedy) == "amqp:resource-limit-exceeded"
            greedy.socket.close()
            far = other.opened().begin()
            good = other.sender(far, "q")
            wait_until(lambda: other.outcome(far, other.post(good, bytes(900_000))) == ACCEPTED)
    postgres.drop_database(database)


def test_a_stop_closes_connections_with_a_reason(postgres: PostgresServer) -> None:
    database = postgres.create_database()
    with DtxService(database=database) as service, Raw(service) as raw:
        raw.opened()
        service.signal(signal.SIGTERM)
        assert closed(raw) == "amqp:connection:forced"
    postgres.drop_database(database)


def test_an_object_without_permission_is_refused(own: DtxService, postgres: PostgresServer) -> None:
    users = StandaloneUsers(own)
    users.add("reader")
    users.permit("reader", configure="^$", write="^$", read="^mine$")
    with connected(own.url()) as connection:
        for name in ("mine", "others"):
            connection.channel().queue_declare(name, durable=True)
    with Raw(own, user="reader", password="reader") as raw:
        session = raw.opened().begin()
        raw.receiver(session, "mine", name="may")
        for role, address in ((Role.RECEIVER, "others"), (Role.SENDER, "mine"), (Role.RECEIVER, None)):
            link = session.new_link(f"{role}-{address}", role)
            link.attach(
                source=Source(address=address if role is Role.RECEIVER else None, dynamic=address is None),
                target=Target(address=address if role is Role.SENDER else None),
            )
            error = raw.detached(link)
            assert error is not None
            assert error.condition == "amqp:unauthorized-access"
        users.remove("reader")
        assert closed(raw) == "amqp:connection:forced"


def test_only_committed_messages_survive_a_kill(postgres: PostgresServer) -> None:
    """An answered discharge is durable. An unanswered one is done completely or not at all."""
    database = postgres.create_database()
    with DtxService(database=database) as service:
        with connected(service.url()) as connection:
            connection.channel().queue_declare("q", durable=True)
            for _ in range(20):
                connection.channel().basic_publish("", "q", b"old", BasicProperties(delivery_mode=2))
        committed = 0
        with Raw(service) as raw:
            session = raw.opened().begin()
            control, sender = raw.control(session), raw.sender(session, "q")
            raw.receiver(session, "q", credit=20)
            for _ in range(10):
                got = raw.take()
                txn_id = raw.declare(session, control)
                for body in (b"a", b"b"):
                    durable = message.head(message.Header(durable=True)) + message.data(body)
                    sender.send(b"t", durable, state=TransactionalState(txn_id=txn_id), settled=True)
                state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
                session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=True)
                if committed < 9:
                    assert raw.discharge(session, control, txn_id) == ACCEPTED
                    committed += 1
                else:
                    control.send(b"request", message.value(Discharge(txn_id=txn_id)))
                    raw.flush()
            service.kill9()
        service.start()
        with connected(service.url()) as connection:
            found = sorted(take_all(connection.channel(), "q"))
    done = found.count(b"a")
    assert done in (committed, committed + 1)
    assert found == [b"a"] * done + [b"b"] * done + [b"old"] * (20 - done)
    postgres.drop_database(database)


def test_handles_and_sessions_are_bounded(service: DtxService) -> None:
    with Raw(service) as raw:
        raw.opened()
        for _ in range(300):
            raw.engine.new_session().begin()
        assert closed(raw).startswith("amqp:")
