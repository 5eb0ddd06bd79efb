"""The opening of a connection: versions, logins, limits and heartbeats."""

import socket
import time
from collections.abc import Callable

import pika
import pytest
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import ProbableAccessDeniedError, ProbableAuthenticationError

from dtx.wire.amqp09 import handshake, methods, tables
from dtx.wire.amqp09.frames import HEARTBEAT, HEARTBEAT_FRAME, method_frame
from dtx.wire.amqp09.methods import DtxEnd, DtxRollback, DtxRollbackOk, DtxSelect, DtxSelectOk, DtxStart
from tests.conftest import ServiceFactory
from tests.support.client import connected, new_xid
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, logged_in, message
from tests.support.service import DtxService


def entries(table: bytes) -> dict[bytes, bytes]:
    return {entry.key: entry.value for entry in tables.entries(table)}


def test_dtx_is_added_to_the_capabilities_of_the_server(service: DtxService, rabbitmq: RabbitNode) -> None:
    with RawClient(rabbitmq.url()) as direct, RawClient(service.url()) as through:
        direct.begin()
        through.begin()
        theirs, ours = entries(direct.start.server_properties), entries(through.start.server_properties)
        assert entries(ours.pop(b"capabilities")) == {**entries(theirs.pop(b"capabilities")), b"dtx": b"\x01"}
        assert ours == theirs
        assert set(through.start.mechanisms.split()) == {b"PLAIN", b"AMQPLAIN"}


def test_amqp_0_9_is_spoken(url: str) -> None:
    with RawClient(url) as peer:
        peer.send_raw(b"AMQP\x01\x01\x00\x09")
        start = methods.ConnectionStart.decode(peer.wait(methods.ConnectionStart.KEY).payload)
        assert (start.version_major, start.version_minor) == (0, 9)
        peer.say(0, peer.start_ok())
        peer.offered = methods.ConnectionTune.decode(peer.wait(methods.ConnectionTune.KEY).payload)
        peer.say(0, peer.tune_ok(), methods.ConnectionOpen(b"/").encode())
        peer.wait(methods.ConnectionOpenOk.KEY)
        peer.open(1)
        peer.say(1, methods.QueueDeclare(b"", exclusive=True).encode())
        peer.wait(methods.QueueDeclareOk.KEY)


@pytest.mark.parametrize(
    "header",
    [b"AMQP\x01\x01\x00\x0a", b"AMQP\x00\x00\x0a\x00", b"GET / HTTP/1.1\r\n\r\n", b"AMQX"],
    ids=repr,
)
def test_a_client_of_another_protocol_gets_the_supported_header(service: DtxService, header: bytes) -> None:
    """AMQP 0-9-1, 4.2.2: the server "MUST write a valid protocol header to the socket, then close the socket"."""
    with RawClient(service.url()) as peer:
        peer.send_raw(header)
        assert peer.drain() == b"AMQP\x00\x00\x09\x01"


def test_tls_to_a_plain_port_is_closed(service: DtxService) -> None:
    with RawClient(service.url()) as peer:
        peer.send_raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))
        assert peer.drain() == b"AMQP\x00\x00\x09\x01"


def test_a_login_by_amqplain_has_its_user_name(service: DtxService) -> None:
    response = tables.entry(b"LOGIN", b"S", b"guest")
    response += tables.entry(b"PASSWORD", b"S", b"guest")
    with RawClient(service.url()) as peer:
        peer.authenticate(b"AMQPLAIN", response)
        peer.say(0, peer.tune_ok(), methods.ConnectionOpen(b"/").encode())
        peer.wait(methods.ConnectionOpenOk.KEY)
        peer.open(1)
        peer.say(1, (101 << 16 | 10).to_bytes(4, "big"))
        peer.wait(101 << 16 | 11)


def test_a_mechanism_that_was_not_offered_ends_in_silence(service: DtxService) -> None:
    """connection.start-ok: "the server MUST close the connection without sending any further data"."""
    with RawClient(service.url()) as peer:
        peer.begin()
        peer.say(0, peer.start_ok(b"EXTERNAL", b""))
        assert peer.drain() == b""


@pytest.mark.parametrize(("octets", "refused"), [(5_000, False), (131_000, False), (131_072, True)])
def test_a_login_may_be_as_long_as_a_frame(service: DtxService, octets: int, refused: bool) -> None:
    """Tokens are longer than frame-min-size. dtx passes on what it accepts; the broker has its own limit."""
    with RawClient(service.url()) as peer:
        peer.begin()
        peer.say(0, peer.start_ok(properties=tables.entry(b"long", b"S", bytes(octets))))
        end = peer.end()
    by_dtx = end is not None and b"bytes in a frame, frame-max is" in end.reply_text
    assert by_dtx is refused


def test_a_wrong_password_is_refused(url: str) -> None:
    parameters = pika.URLParameters(url)
    parameters.credentials = pika.PlainCredentials("guest", "wrong")
    with pytest.raises(ProbableAuthenticationError, match="403"):
        BlockingConnection(parameters)


def test_a_missing_vhost_is_refused(url: str) -> None:
    parameters = pika.URLParameters(url)
    parameters.virtual_host = "no such vhost"
    with pytest.raises(ProbableAccessDeniedError, match="530"):
        BlockingConnection(parameters)


@pytest.mark.parametrize("frame_max", [4096, 8192, 131072])
def test_any_frame_size_can_be_agreed(url: str, frame_max: int) -> None:
    with RawClient(url) as peer:
        peer.log_in(frame_max=frame_max)
        peer.open(1)
        peer.say(1, methods.QueueDeclare(b"", exclusive=True).encode())
        queue = peer.wait(methods.QueueDeclareOk.KEY).payload[5:]
        name = queue[: len(queue) - 8]
        body = bytes(range(256)) * 1200
        peer.send_raw(message(1, name, body, frame_max=frame_max))
        peer.say(1, methods.BasicGet(name, no_ack=True).encode())
        peer.wait(methods.BasicGetOk.KEY)
        received = bytearray()
        while len(received) < len(body):
            frame = peer.frame()
            assert frame is not None
            assert len(frame.payload) + 8 <= frame_max
            if frame.key == 3:
                received += frame.payload
        assert received == body


@pytest.mark.parametrize("wanted", [{"frame_max": 131073}, {"channel_max": 2048}, {"channel_max": 0}, {"frame_max": 0}])
def test_more_than_offered_is_not_agreed(service: DtxService, wanted: dict[str, int]) -> None:
    """connection.tune-ok: "If the client specifies a channel max that is higher than the value provided by the server,
    the server MUST close the connection without attempting a negotiated close."
    """
    with RawClient(service.url()) as peer:
        peer.authenticate()
        peer.say(0, peer.tune_ok(**wanted), methods.ConnectionOpen(b"/").encode())
        end = peer.end()
        assert end is not None
        assert end.reply_code == 530


def test_all_channels_can_be_open_and_selected_at_once(service: DtxService) -> None:
    """A selected channel uses two of the broker's 2047 channels; the connection needs two more."""
    with RawClient(service.url()) as peer:
        peer.log_in()
        most = peer.offered.channel_max
        assert most == 1022
        peer.open(*range(1, most + 1))
        for channel in (1, most):
            peer.say(channel, methods.QueueDeclare(b"", exclusive=True).encode())
            peer.wait(methods.QueueDeclareOk.KEY, channel=channel)
        for channel in range(1, most + 1):
            peer.say(channel, DtxSelect().encode())
            peer.wait(DtxSelectOk.KEY, channel=channel)
        peer.close()


def test_one_channel_too_many_is_refused(url: str) -> None:
    with RawClient(url) as peer:
        peer.log_in(channel_max=10)
        peer.open(*range(1, 11))
        peer.say(11, methods.ChannelOpen().encode())
        end = peer.end()
        assert end is not None
        assert end.reply_code == 530


def test_select_leaves_the_remaining_channels_to_the_client(service: DtxService, filled: str) -> None:
    """Branches keep channels that their client has closed: the next select is refused, but no open is."""
    xids = []
    with RawClient(service.url()) as peer:
        peer.log_in()
        most = peer.offered.channel_max
        for _ in range(3):
            peer.open(1)
            xids.append(new_xid())
            peer.say(
                1, DtxSelect().encode(), DtxStart(xid=xids[-1]).encode(), methods.BasicGet(filled.encode()).encode()
            )
            tag = methods.BasicGetOk.decode(peer.wait(methods.BasicGetOk.KEY).payload).delivery_tag
            peer.say(1, methods.BasicAck(tag).encode(), DtxEnd(xid=xids[-1]).encode())
            peer.say(1, methods.ChannelClose(200, b"done").encode())
            peer.wait(methods.ChannelCloseOk.KEY)
        peer.open(*range(2, most + 1))
        for channel in range(2, most):
            peer.say(channel, DtxSelect().encode())
            peer.wait(DtxSelectOk.KEY, channel=channel)
        peer.say(most, DtxSelect().encode())
        refusal = peer.channel_end(most)
        assert refusal.reply_code == 506
        assert b"a selected channel needs two" in refusal.reply_text
        peer.say(most, methods.ChannelCloseOk().encode())
        peer.open(1, most)
        for xid in xids:
            peer.say(1, DtxRollback(xid=xid).encode())
            peer.wait(DtxRollbackOk.KEY)


# -- heartbeats


def test_a_silent_client_is_given_up(service: DtxService) -> None:
    with RawClient(service.url()) as peer:
        peer.log_in(heartbeat=1)
        begun = time.monotonic()
        peer.drain()
        assert 1 < time.monotonic() - begun < 5


def test_a_client_that_only_sends_heartbeats_is_kept(service: DtxService) -> None:
    with RawClient(service.url()) as peer:
        peer.log_in(heartbeat=1)
        for _ in range(4):
            frame = peer.frame()
            assert frame is not None
            assert frame.key == HEARTBEAT
            peer.send_raw(HEARTBEAT_FRAME)


def test_a_client_without_heartbeats_is_left_alone_and_gets_none(dtx_service: ServiceFactory) -> None:
    service = dtx_service("--upstream-heartbeat", "1")
    with logged_in(service.url()) as peer:
        peer.socket.settimeout(4)
        with pytest.raises(TimeoutError):
            peer.frame()
        peer.socket.settimeout(10)
        peer.open(2)


def test_a_silent_broker_is_noticed(
    dtx_service: ServiceFactory, proxy: Callable[[str, int], Proxy], rabbitmq: RabbitNode
) -> None:
    between = proxy("127.0.0.1", rabbitmq.port)
    service = dtx_service("--upstream-heartbeat", "1", broker=f"amqp://guest:guest@127.0.0.1:{between.port}/")
    with logged_in(service.url()) as peer:
        peer.say(1, methods.QueueDeclare(b"", exclusive=True).encode())
        peer.wait(methods.QueueDeclareOk.KEY)
        between.stall()
        end = peer.end()
        assert end is not None
        assert end.reply_code == 320
        assert b"heartbeat" in end.reply_text
    between.resume()
    with connected(service.url()) as connection:
        assert connection.channel().is_open


# -- the steps of the handshake have one order; the user is authenticated once


@pytest.mark.parametrize(
    "early",
    [
        lambda peer: (peer.tune_ok(2047, 0).frame(0),),
        lambda peer: (methods.ConnectionOpen(b"/").frame(0),),
        lambda peer: (peer.start_ok().frame(0), peer.start_ok().frame(0)),
        lambda peer: (peer.start_ok().frame(0), peer.tune_ok(2047, 131072).frame(0)),
        lambda peer: (methods.ChannelOpen().frame(1),),
        lambda peer: (method_frame(0, (101 << 16 | 10).to_bytes(4, "big")),),
        lambda peer: (method_frame(1, (105 << 16 | 50).to_bytes(4, "big") + bytes(7)),),
    ],
    ids=["tune-ok", "open", "start-ok twice", "tune-ok before tune", "channel", "dtx on 0", "dtx on 1"],
)
def test_a_method_out_of_order_in_the_handshake_is_refused(service: DtxService, early: object) -> None:
    assert callable(early)
    with RawClient(service.url()) as peer:
        peer.begin()
        peer.send_raw(*early(peer))
        end = peer.end()
        assert end is not None
        assert end.reply_code in (503, 504)


def test_no_user_changes_after_the_login(service: DtxService, rabbitmq: RabbitNode) -> None:
    """Branches belong to the user that the broker authenticated: a second start-ok is refused at once."""
    rabbitmq.add_user("mallory")
    with RawClient(service.url("mallory")) as peer:
        peer.authenticate()
        victim = peer.start_ok(response=handshake.plain(b"guest", b"unknown"))
        peer.say(0, peer.tune_ok(), methods.ConnectionOpen(b"/").encode(), victim)
        frame = peer.frame()
        assert frame is not None
        assert frame.key == methods.ConnectionClose.KEY, "the connection was opened"
    rabbitmq.delete_user("mallory")


def test_a_slow_handshake_is_given_up(dtx_service: ServiceFactory) -> None:
    service = dtx_service("--handshake-timeout", "1", "--header-timeout", "1")
    for sent in (b"", b"AMQP", b"AMQP\x00\x00\x09\x01"):
        with RawClient(service.url()) as peer:
            peer.send_raw(sent)
            begun = time.monotonic()
            peer.drain()
            assert time.monotonic() - begun < 5


def test_a_handshake_in_single_bytes_succeeds(service: DtxService) -> None:
    with RawClient(service.url()) as peer:
        for octet in b"AMQP\x00\x00\x09\x01":
            peer.send_raw(bytes((octet,)))
        peer.wait(methods.ConnectionStart.KEY)
        for octet in peer.start_ok().frame(0):
            peer.send_raw(bytes((octet,)))
        peer.wait(methods.ConnectionTune.KEY)


def test_a_client_that_hangs_up_in_the_handshake_costs_nothing(service: DtxService) -> None:
    for sent in (b"AMQP", b"AMQP\x00\x00\x09\x01"):
        with RawClient(service.url()) as peer:
            peer.send_raw(sent)
            peer.socket.shutdown(socket.SHUT_WR)
            peer.drain()
