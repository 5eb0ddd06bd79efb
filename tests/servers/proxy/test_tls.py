"""TLS on both sides: clients to dtx (--tls-cert, --tls-key, --tls-ca), dtx to the broker (amqps)."""

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingConnection

from dtx.client import XAResource
from dtx.wire.amqp09.frames import Protocol
from dtx.wire.amqp10.performatives import ACCEPTED
from dtx.xa.codes import XaFlag
from tests.conftest import ServiceFactory
from tests.servers.amqp10.raw import Raw, body
from tests.support.client import new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, message
from tests.support.service import DtxService


@pytest.fixture(scope="module")
def tls_node(certificates: Path) -> Iterator[RabbitNode]:
    """A node that accepts amqps as well."""
    with RabbitNode(tls=certificates) as node:
        yield node


def encrypted(service: DtxService, certificates: Path, client: str | None = None) -> pika.ConnectionParameters:
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    if client is not None:
        context.load_cert_chain(certificates / f"{client}.pem", certificates / f"{client}.key")
    parameters = pika.URLParameters(service.url())
    parameters.ssl_options = pika.SSLOptions(context, "127.0.0.1")
    return parameters


def server_flags(certificates: Path) -> tuple[str, ...]:
    return "--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key")


def test_both_sides_are_encrypted(dtx_service: ServiceFactory, tls_node: RabbitNode, certificates: Path) -> None:
    flags = (*server_flags(certificates), "--broker-ca", str(certificates / "ca.pem"))
    service = dtx_service(*flags, broker=tls_node.url(tls=True))
    connection = BlockingConnection(encrypted(service, certificates))
    channel = connection.channel()
    queue = channel.queue_declare("encrypted", durable=True).method.queue
    xa = XAResource(channel)
    xid = new_xid()
    xa.start(xid)
    channel.basic_publish("", queue, bytes(3_000_000))
    xa.end(xid)
    assert xa.prepare(xid) == XaFlag.OK
    assert xa.commit(xid) == XaFlag.OK
    assert channel.basic_get(queue, auto_ack=True)[2] == bytes(3_000_000)
    connection.close()


def test_both_sides_of_an_amqp_1_0_client_are_encrypted(
    dtx_service: ServiceFactory, tls_node: RabbitNode, certificates: Path
) -> None:
    service = dtx_service(
        *server_flags(certificates), "--broker-ca", str(certificates / "ca.pem"), broker=tls_node.url(tls=True)
    )
    with tls_node.channel() as channel:
        channel.queue_declare("encrypted-1.0", durable=True)
    with Raw(service, tls=ssl.create_default_context(cafile=str(certificates / "ca.pem"))) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        link = raw.sender(session, "encrypted-1.0")
        txn_id = raw.declare(session, control)
        assert raw.post(link, bytes(1_000_000), txn_id) is not None
        assert raw.discharge(session, control, txn_id) == ACCEPTED
        raw.receiver(session, "encrypted-1.0")
        assert body(raw.take()) == bytes(1_000_000)


def test_a_broker_with_an_untrusted_certificate_is_refused(
    dtx_service: ServiceFactory, tls_node: RabbitNode, certificates: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"is not trusted .*--broker-ca"):
        dtx_service(broker=tls_node.url(tls=True))


def test_plain_amqp_to_a_tls_port_is_closed(dtx_service: ServiceFactory, certificates: Path) -> None:
    service = dtx_service(*server_flags(certificates))
    with RawClient(service.url()) as peer:
        peer.send_raw(b"AMQP\x00\x00\x09\x01")
        assert b"AMQP" not in peer.drain()


def test_a_client_that_never_shakes_hands_is_closed(dtx_service: ServiceFactory, certificates: Path) -> None:
    service = dtx_service(*server_flags(certificates), "--header-timeout", "1")
    with RawClient(service.url()) as peer:
        begun = time.monotonic()
        peer.drain()
        assert time.monotonic() - begun < 10


def test_a_socket_counts_before_its_handshake_is_over(dtx_service: ServiceFactory, certificates: Path) -> None:
    """--max-connections also limits sockets on which no handshake has begun or ended."""
    service = dtx_service(*server_flags(certificates), "--max-connections", "2", "--header-timeout", "600")
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with RawClient(service.url()) as silent, RawClient(service.url()) as stammering:
        stammering.send_raw(b"\x16\x03\x01\x02\x00")  # the beginning of a ClientHello
        with RawClient(service.url()) as third:
            assert third.drain() == b""

        def let_in() -> bool:
            try:
                with RawClient(service.url(), tls=context) as peer:
                    peer.log_in()
                    peer.close()
            except OSError:
                return False
            return True

        assert not let_in()
        silent.socket.close()
        wait_until(let_in, seconds=30, what="room for one more")
        assert service.stop() == 0  # an unfinished handshake does not delay the end


def test_a_handshake_that_fails_makes_room_for_others(dtx_service: ServiceFactory, certificates: Path) -> None:
    """A socket whose handshake failed no longer counts towards --max-connections."""
    service = dtx_service(*server_flags(certificates), "--max-connections", "1", "--header-timeout", "600")
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    for _ in range(3):
        with RawClient(service.url()) as wrong:
            wrong.send_raw(b"GET / HTTP/1.1\r\n\r\n")
            wrong.drain()
    with RawClient(service.url(), tls=context) as peer:
        peer.log_in()


def test_data_together_with_the_handshakes_end_is_read(dtx_service: ServiceFactory, certificates: Path) -> None:
    """In TLS 1.3 a client may send data with its last message of the handshake; dtx answers encrypted."""
    service = dtx_service(*server_flags(certificates))
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    for _ in range(5):
        with RawClient(service.url()) as peer:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            session = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            while True:
                try:
                    session.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    peer.send_raw(outgoing.read())
                    incoming.write(peer.socket.recv(65536))
            session.write(Protocol.AMQP_0_9_1.value)
            peer.send_raw(outgoing.read())
            answer = b""
            while len(answer) < 7:
                try:
                    answer += session.read()
                except ssl.SSLWantReadError:
                    incoming.write(peer.socket.recv(65536))
            assert answer[:3] == b"\x01\x00\x00"  # a method on channel 0


def test_client_certificates_are_demanded(dtx_service: ServiceFactory, certificates: Path) -> None:
    service = dtx_service(*server_flags(certificates), "--tls-ca", str(certificates / "ca.pem"))
    connection = BlockingConnection(encrypted(service, certificates, "client"))
    assert connection.channel().is_open
    connection.close()
    with pytest.raises((pika.exceptions.AMQPError, ssl.SSLError, OSError)):
        BlockingConnection(encrypted(service, certificates))


def test_a_tls_client_that_never_reads_is_disconnected(dtx_service: ServiceFactory, certificates: Path) -> None:
    service = dtx_service(*server_flags(certificates))
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with RawClient(service.url(), tls=context) as peer:
        peer.log_in()
        peer.open(1)
        peer.send_raw(message(1, b"nowhere", bytes(100_000)))
        peer.socket.shutdown(socket.SHUT_RDWR)
    assert service.stop() == 0
