"""Standalone mode under more load than PostgreSQL or a client can take: dtx waits, and its memory is limited."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from dtx.wire.amqp09 import methods, tables
from dtx.wire.amqp09.frames import HEADER
from tests.support.broker import Mode, only_standalone
from tests.support.postgres import PostgresServer
from tests.support.processes import resident, wait_until
from tests.support.raw import RawClient, logged_in, message
from tests.support.service import DtxService

pytestmark = only_standalone
MEGABYTE = 1 << 20
LIMIT = 96 * MEGABYTE
"""Bytes: far more than all limits of one connection together, and far less than these tests send."""


@pytest.fixture(scope="module")
def database_server() -> Iterator[PostgresServer]:
    """A server that tests may pause."""
    with PostgresServer("pressed") as server:
        yield server


@pytest.fixture(scope="module")
def own_service(mode: Mode, database_server: PostgresServer) -> Iterator[DtxService]:
    """A service with a database on that server."""
    options = ("--lease-ttl", "30", "--max-held-bytes", "24MiB", "--frame-max", "2MiB")
    with DtxService(database=database_server.create_database(), options=options) as running:
        yield running


def exclusive_queue(peer: RawClient) -> bytes:
    peer.say(1, methods.QueueDeclare(b"", exclusive=True).encode())
    return methods.QueueDeclareOk.decode(peer.wait(methods.QueueDeclareOk.KEY).payload).queue


def push(peer: RawClient, data: bytes, most: int, patience: float = 1.0) -> int:
    """Send *data* repeatedly until the service takes no more for *patience* seconds; returns the bytes sent."""
    peer.socket.settimeout(patience)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < most:
            sent += peer.socket.send(data[sent % len(data) :])
    peer.socket.settimeout(60)
    return sent


def test_a_publisher_faster_than_the_database_is_slowed_down(
    own_service: DtxService, database_server: PostgresServer
) -> None:
    """Reading stops while messages wait to be written. Then it continues, and no message is lost."""
    size = 64 * 1024
    with logged_in(own_service.url()) as peer, logged_in(own_service.url()) as other:
        queue = exclusive_queue(peer)
        peer.say(1, methods.ConfirmSelect().encode())
        peer.wait(methods.ConfirmSelectOk.KEY)
        whole = message(1, queue, bytes(size))
        before = resident(own_service.pid)
        database_server.pause()
        try:
            sent = push(peer, whole, 1024 * MEGABYTE)
            assert sent < LIMIT
            assert resident(own_service.pid) - before < LIMIT
            # a call that needs no database does not wait
            other.say(1, methods.BasicQos(0, 1).encode())
            other.wait(methods.BasicQosOk.KEY)
        finally:
            database_server.resume()
        count = -(-sent // len(whole))
        peer.send_raw(whole[sent % len(whole) :] if sent % len(whole) else b"")
        confirmed = 0
        while confirmed < count:
            settle = methods.BasicAck.decode(peer.wait(methods.BasicAck.KEY).payload)
            confirmed = settle.delivery_tag if settle.multiple else confirmed + 1
        peer.say(1, methods.QueueDelete(queue).encode())
        assert peer.wait(methods.QueueDeleteOk.KEY).payload[4:] == count.to_bytes(4, "big")


def test_a_blocked_publisher_is_notified(own_service: DtxService, database_server: PostgresServer) -> None:
    """Clients with the capability connection.blocked get that method."""
    blocked = tables.entry(b"connection.blocked", b"t", b"\x01")
    with RawClient(own_service.url()) as peer:
        peer.log_in(properties=tables.entry(b"capabilities", b"F", blocked))
        peer.open(1)
        whole = message(1, exclusive_queue(peer), bytes(64 * 1024))
        database_server.pause()
        try:
            sent = push(peer, whole, 1024 * MEGABYTE)
            peer.wait(methods.ConnectionBlocked.KEY)
        finally:
            database_server.resume()
        peer.send_raw(whole[sent % len(whole) :] if sent % len(whole) else b"")
        peer.wait(methods.ConnectionUnblocked.KEY)


def test_many_publishers_together_have_a_limit(own_service: DtxService, database_server: PostgresServer) -> None:
    """The limit of all clients (--max-held-bytes) is lower than the sum of their own limits; no client is refused."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(logged_in(own_service.url())) for _ in range(8)]
        wholes = [message(1, exclusive_queue(peer), bytes(64 * 1024)) for peer in peers]
        before = resident(own_service.pid)
        database_server.pause()
        try:
            sent = [push(peer, whole, 64 * MEGABYTE, 0.3) for peer, whole in zip(peers, wholes, strict=True)]
            assert max(sent) < 64 * MEGABYTE
            assert resident(own_service.pid) - before < LIMIT  # less than eight times the limit of one client
        finally:
            database_server.resume()
        for peer, whole, octets in zip(peers, wholes, sent, strict=True):
            peer.send_raw(whole[octets % len(whole) :] if octets % len(whole) else b"")
            peer.say(1, methods.BasicQos(0, 1).encode())
            peer.wait(methods.BasicQosOk.KEY)


def test_a_reader_that_is_slow_gets_everything_in_the_end(service: DtxService) -> None:
    """Messages that it does not read stay in the database. Others are served meanwhile; it gets all in order."""
    count = 120
    with logged_in(service.url()) as slow, logged_in(service.url()) as quick:
        queue = exclusive_queue(slow)
        own = exclusive_queue(quick)
        before = resident(service.pid)
        for number in range(count):
            slow.send_raw(message(1, queue, number.to_bytes(4, "big") * (MEGABYTE // 4)))
        slow.say(1, methods.BasicConsume(queue, b"slow").encode())
        quick.say(1, methods.BasicConsume(own, b"quick", no_ack=True).encode())
        started = time.monotonic()
        for number in range(20):
            quick.send_raw(message(1, own, b"%d" % number))
            assert quick.wait(3).payload == b"%d" % number
        assert time.monotonic() - started < 60
        wait_until(lambda: resident(service.pid) - before < 300 * MEGABYTE, what="memory that is free again")
        for number in range(count):
            assert slow.wait(HEADER).payload[4:12] == MEGABYTE.to_bytes(8, "big")
            body = b""
            while len(body) < MEGABYTE:
                body += slow.wait(3).payload
            assert body[:4] == number.to_bytes(4, "big")
        slow.say(1, methods.BasicAck(0, multiple=True).encode())


def test_clients_killed_within_a_frame_leave_nothing(own_service: DtxService) -> None:
    """Each sends a frame of a megabyte without its last byte. The memory is free before a garbage collection."""
    before = resident(own_service.pid)
    for _ in range(150):
        with logged_in(own_service.url()) as peer:
            peer.send_raw(message(1, b"nowhere", bytes(MEGABYTE), frame_max=2 * MEGABYTE)[:-1])
            peer.socket.shutdown(socket.SHUT_WR)
            peer.drain()
    assert resident(own_service.pid) - before < 48 * MEGABYTE
