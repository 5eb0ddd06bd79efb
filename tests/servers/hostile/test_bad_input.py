"""Clients that break the protocol are closed with a reason, and other clients are not affected."""

import contextlib
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingConnection

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import header_frame, method_frame
from dtx.wire.amqp09.methods import DtxPrepare, DtxRecover, DtxRecoverOk, DtxSelect, DtxSelectOk
from tests.servers.amqp10.raw import Raw
from tests.servers.amqp10.test_connections import closed
from tests.servers.hostile.conftest import StartService
from tests.support.broker import Broker
from tests.support.client import connected
from tests.support.processes import resident, wait_until
from tests.support.raw import NO_PROPERTIES, ConnectionEnded, RawClient, logged_in, message
from tests.support.service import DtxService

SELECT = method_frame(1, DtxSelect().encode())
PUBLISH = methods.BasicPublish(b"", b"nowhere").frame(1)


@pytest.fixture
def bystander(through: BlockingConnection) -> Iterator[None]:
    """Another client, which must not be affected."""
    channel = through.channel()
    channel.confirm_delivery()
    queue = channel.queue_declare("", exclusive=True).method.queue
    yield
    channel.basic_publish("", queue, b"still here", mandatory=True)
    assert channel.basic_get(queue, auto_ack=True)[2] == b"still here"


def frame(kind: int, channel: int, payload: bytes, end: int = 0xCE) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + bytes((end,))


# The broker itself closes the socket without a close method.
_DROPPED = (320, 501, 503, 540)
MALFORMED: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "unknown frame type": (frame(9, 1, b"abcd"), (501,)),
    "bad frame end": (frame(1, 1, methods.ChannelOpen().encode(), 0), (501,)),
    "longer than frame-max": (struct.pack(">BHI", 3, 1, 131073), (501,)),
    "four gigabytes": (struct.pack(">BHI", 3, 1, 0xFFFFFFFF), (501,)),
    "heartbeat on a channel": (frame(8, 1, b""), (501,)),
    "heartbeat with a payload": (frame(8, 0, b"x"), (501,)),
    "method without a method": (frame(1, 1, b"\x00\x0a"), (502,)),
    "http": (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", (501,)),
    "content without a publish": (header_frame(1, 60, 3, NO_PROPERTIES), (501, 505)),
    "body without a publish": (frame(3, 1, b"abc"), (501, 505)),
    "method within content": (PUBLISH + PUBLISH, (505,)),
    "header of another class": (PUBLISH + header_frame(1, 70, 3, NO_PROPERTIES), (501, 505)),
    "truncated publish": (frame(1, 1, PUBLISH[7:12]), (501, 502)),
    "truncated declare": (frame(1, 1, methods.QueueDeclare.HEAD), (501, 502, 541)),
    "truncated declare with a name": (
        frame(1, 1, methods.QueueDeclare.HEAD + b"\0\0\xff"),
        (501, 502, 541),
    ),
    "truncated consume": (frame(1, 1, methods.BasicConsume.HEAD + b"\0\0"), (501, 502, 541)),
    "truncated ack": (frame(1, 1, methods.BasicAck.HEAD + b"\0\0"), (501, 502, 541)),
    "unknown class": (frame(1, 1, b"\x12\x34\x00\x0a"), _DROPPED),
    "class between the dtx classes": (frame(1, 1, b"\x00\x66\x00\x0a"), _DROPPED),
    "method on a channel that is not open": (frame(1, 77, methods.QueueDeclare(b"").encode()), (504,)),
    "channel opened twice": (methods.ChannelOpen().frame(1), (504,)),
    "close-ok without a close": (frame(1, 78, methods.ChannelCloseOk().encode()), (504,)),
    "channel.open on channel 0": (frame(1, 0, methods.ChannelOpen().encode()), (503, 504)),
    "dtx select on channel 0": (frame(1, 0, DtxSelect().encode()), (503,)),
    "dtx recover on channel 0": (frame(1, 0, DtxRecover.HEAD + bytes(7)), (503,)),
    "body on channel 0": (frame(3, 0, b"abc"), (503, 505)),
    "tune-ok once more": (frame(1, 0, struct.pack(">IHIH", methods.ConnectionTuneOk.KEY, 0, 0, 0)), (503,)),
    "open once more": (frame(1, 0, methods.ConnectionOpen.HEAD + b"\x01/\x00\x00"), (503,)),
    "start-ok once more": (frame(1, 0, methods.ConnectionStartOk.HEAD + bytes(10)), (503,)),
}


@pytest.mark.parametrize("selected", [False, True], ids=["plain", "selected"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_input_closes_the_connection_with_a_reason(
    service: DtxService, bystander: None, name: str, selected: bool
) -> None:
    data, codes = MALFORMED[name]
    with logged_in(service.url()) as peer:
        if selected:
            peer.send_raw(SELECT)
            peer.wait(DtxSelectOk.KEY)
        peer.send_raw(data)
        end = peer.end()
        assert end is not None, "the socket was closed without a close method"
        assert end.reply_code in codes, end


@pytest.mark.parametrize("selected", [False, True], ids=["plain", "selected"])
@pytest.mark.parametrize(
    "data",
    [
        PUBLISH + header_frame(1, 60, 3, NO_PROPERTIES) + frame(3, 1, b"abcdef"),
        frame(1, 1, methods.BasicDeliver(b"tag", 1, False, b"", b"").encode()),
    ],
    ids=["more body than announced", "a method of servers"],
)
def test_input_that_the_broker_ignores_harms_no_client(
    service: DtxService, bystander: None, data: bytes, selected: bool
) -> None:
    with logged_in(service.url()) as peer:
        if selected:
            peer.send_raw(SELECT)
            peer.wait(DtxSelectOk.KEY)
        peer.send_raw(data)


BAD_CALLS = {
    "unknown method of class 101": (b"\x00\x65\x00\x63", 540),
    "unknown method of class 105": (b"\x00\x69\x27\x0f", 540),
    "an answer": (DtxSelectOk().encode(), 503),
    "another answer": (DtxRecoverOk.HEAD + bytes(4), 503),
    "prepare without xid": (DtxPrepare.HEAD, 502),
    "prepare with half an xid": (DtxPrepare.HEAD + b"\0\0\0\0\0\x09\0\0\0\1\x04\x04abc", 502),
    "xid longer than its frame": (DtxPrepare.HEAD + b"\0\0\xff\xff\xff\xff", 502),
    "gtrid of 65": (DtxPrepare.HEAD + b"\0\0\0\0\0\x47\0\0\0\1\x41\0" + bytes(65), 502),
    "empty gtrid": (DtxPrepare.HEAD + b"\0\0\0\0\0\x06\0\0\0\1\0\0", 502),
    "short recover": (DtxRecover.HEAD + bytes(3), 502),
    "select with arguments": (DtxSelect().encode() + b"x", 502),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_dtx_methods_close_the_channel_alone(service: DtxService, broker: Broker, name: str) -> None:
    """Classes 101 and 105 never reach the broker, which would close the connection."""
    payload, code = BAD_CALLS[name]
    with logged_in(service.url()) as peer:
        peer.open(2)
        peer.say(1, payload)
        assert peer.channel_end(1).reply_code == code
        peer.say(1, methods.ChannelCloseOk().encode())
        peer.open(1)
        peer.say(2, methods.QueueDeclare(b"", exclusive=True).encode())
        peer.wait(methods.QueueDeclareOk.KEY)


def test_frames_on_a_refused_channel_are_dropped_until_close_ok(service: DtxService, queue: str) -> None:
    with logged_in(service.url()) as peer:
        peer.send_raw(method_frame(1, b"\x00\x65\x00\x63"), message(1, queue.encode(), b"dropped"))
        peer.channel_end(1)
        peer.send_raw(message(1, queue.encode(), b"dropped too"))
        peer.say(1, methods.ChannelCloseOk().encode())
        peer.open(1)
        peer.say(1, methods.BasicGet(queue.encode()).encode())
        peer.wait(methods.BasicGetEmpty.KEY)


def test_a_stream_in_single_bytes_is_read(service: DtxService, queue: str, broker: Broker) -> None:
    with logged_in(service.url()) as peer:
        for octet in message(1, queue.encode(), b"slowly"):
            peer.send_raw(bytes((octet,)))
        peer.close()
    assert broker.count(queue) == 1


def test_half_a_frame_and_an_end(service: DtxService, bystander: None) -> None:
    for cut in (3, 9, 20):
        with logged_in(service.url()) as peer:
            peer.send_raw(PUBLISH[:cut])
            peer.socket.shutdown(socket.SHUT_WR)
            peer.drain()


def test_a_reset_in_the_midst(service: DtxService, bystander: None) -> None:
    for sent in (b"", SELECT, SELECT + PUBLISH):
        with logged_in(service.url()) as peer:
            peer.send_raw(sent)
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# -- many clients, slow clients, clients that do not read


def ask_on(peer: RawClient, call: bytes, seconds: float) -> int:
    """Send *call* repeatedly without reading; returns the number of bytes sent before the service took no more."""
    peer.socket.settimeout(0.5)
    sent = 0
    until = time.monotonic() + seconds
    with contextlib.suppress(TimeoutError):
        while time.monotonic() < until:
            sent += peer.socket.send(call)
    return sent


@pytest.mark.parametrize(
    "call",
    [
        SELECT,
        method_frame(1, methods.BasicRecover.HEAD + b"\1"),
        method_frame(1, DtxRecover.HEAD + b"\0\0\1\0\0\0\0"),
    ],
    ids=["select", "basic.recover", "recover"],
)
def test_a_client_that_never_reads_its_answers_costs_no_memory(
    service: DtxService, bystander: None, call: bytes
) -> None:
    before = resident(service.pid)
    with logged_in(service.url()) as peer:
        peer.send_raw(SELECT)
        peer.wait(DtxSelectOk.KEY)
        ask_on(peer, call * 5000, 6)
        assert resident(service.pid) - before < 64 << 20


def test_a_client_that_never_reads_its_messages_costs_no_memory(
    service: DtxService, bystander: None, queue: str, broker: Broker
) -> None:
    with broker.channel() as channel:
        for _ in range(100):
            channel.basic_publish("", queue, bytes(1 << 20))
    before = resident(service.pid)
    with logged_in(service.url()) as peer:
        peer.say(1, methods.BasicConsume(queue.encode(), b"deaf").encode())
        time.sleep(2)  # time in which dtx must not take all messages
        assert resident(service.pid) - before < 32 << 20
    with broker.channel() as channel:
        wait_until(lambda: channel.queue_declare(queue, passive=True).method.message_count == 100, what="all back")


def test_a_socket_that_is_never_read_is_closed(start_service: StartService) -> None:
    service = start_service("--max-connections", "1")
    with logged_in(service.url()) as peer:
        peer.say(1, methods.QueueDeclare(b"", exclusive=True).encode())
        queue = methods.QueueDeclareOk.decode(peer.wait(methods.QueueDeclareOk.KEY).payload).queue
        for _ in range(50):
            peer.send_raw(message(1, queue, bytes(1 << 20)))
        peer.say(1, methods.BasicConsume(queue, b"deaf").encode(), b"\x12\x34\x00\x0a")
        wait_until(lambda: works(service.url()), seconds=60, what="room for another client")


def works(url: str) -> bool:
    try:
        with connected(url) as connection:
            connection.channel()
    except (pika.exceptions.AMQPError, OSError):
        return False
    return True


def test_the_last_places_are_kept_for_coordinators(start_service: StartService) -> None:
    """Clients that are refused for lack of a place get the reason, in AMQP 0-9-1 and in AMQP 1.0."""
    service = start_service("--max-connections", "1", "--coordinator", "somebody")
    with connected(service.url()):
        with RawClient(service.url()) as peer, pytest.raises(ConnectionEnded, match="connection limit reached"):
            peer.log_in()
        with Raw(service) as raw:
            assert closed(raw) == "amqp:resource-limit-exceeded"
    wait_until(lambda: works(service.url()), what="the place of the client that has left")


def idle_sockets(service: DtxService, count: int) -> list[socket.socket]:
    sockets = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            sockets.append(socket.create_connection((service.host, service.port), 10))
    return sockets


def test_ten_thousand_connections_that_send_nothing(
    start_service: StartService, left_out: Callable[[str], None]
) -> None:
    """Connections within --max-connections are closed after --header-timeout, further ones at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(10_000, hard - 500)
    if count < 10_000:
        left_out(f"only {count} of 10,000 silent connections: more open files are not allowed")
    service = start_service("--max-connections", "500", "--header-timeout", "3")
    with connected(service.url()) as connection:
        channel = connection.channel()
        sockets = idle_sockets(service, count)
        try:
            assert channel.queue_declare("", exclusive=True)
            wait_until(lambda: works(service.url()), seconds=20, what="room for a client that speaks")
            assert channel.queue_declare("", exclusive=True)
        finally:
            for one in sockets:
                one.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wait_until(lambda: len(list(Path(f"/proc/{service.pid}/fd").iterdir())) < 200, what="all sockets closed")
