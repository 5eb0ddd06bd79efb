"""The handshake of standalone mode, without sockets."""

from dataclasses import replace

import pytest
from pika import amqp_object, frame, spec

from dtx.server.limits import ConnectionLimits
from dtx.server.standalone.opening import Opening
from dtx.wire.amqp09 import methods, tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.frames import FrameSplitter
from dtx.wire.amqp09.handshake import Credentials
from tests.evidence.fuzz.server import AMQPLAIN, ENTER, FRAME_MAX, converse

LIMITS = ConnectionLimits(max_channels=100, frame_max=65_536, max_message_bytes=1, handshake_timeout=1)
CAPABLE = {"capabilities": {"authentication_failure_close": True, "consumer_cancel_notify": True}}


def payload(method: amqp_object.Method) -> bytes:
    marshalled: bytes = frame.Method(0, method).marshal()
    return marshalled[7:-1]


def start_ok(properties: object) -> bytes:
    return payload(spec.Connection.StartOk(properties, "PLAIN", b"\0guest\0secret", "en_US"))


@pytest.fixture
def opening() -> Opening:
    return Opening(LIMITS)


def test_the_greeting_says_what_the_server_can_do() -> None:
    method = frame.decode_frame(Opening.greeting())[1].method
    assert (method.version_major, method.version_minor) == (0, 9)
    assert set(method.mechanisms.split()) == {b"PLAIN", b"AMQPLAIN"}
    assert method.server_properties["product"] == "dtx"
    capabilities = method.server_properties["capabilities"]
    assert all(capabilities.values())
    assert {"dtx", "publisher_confirms", "basic.nack", "consumer_cancel_notify", "per_consumer_qos"} <= set(
        capabilities
    )
    assert "direct_reply_to" in capabilities


def test_start_ok_says_who_it_is_and_what_the_client_understands(opening: Opening) -> None:
    assert opening.start_ok(start_ok(CAPABLE)) == Credentials(b"guest", b"secret")
    assert opening.hears_of_failed_login
    assert opening.hears_of_cancelled_consumers
    assert not opening.hears_of_blocking


def test_each_step_is_expected_once_and_in_its_turn(opening: Opening) -> None:
    """Who a client is, is decided once: nothing may come while that is being looked up."""
    with pytest.raises(WireError, match="503: method is not the next step"):
        opening.expect(methods.ConnectionTuneOk.KEY)
    opening.expect(methods.ConnectionStartOk.KEY)
    with pytest.raises(WireError, match="not the next step"):
        opening.expect(methods.ConnectionStartOk.KEY)
    opening.tune()
    opening.expect(methods.ConnectionTuneOk.KEY)
    opening.tune_ok(payload(spec.Connection.TuneOk(10, 4096, 5)))
    opening.expect(methods.ConnectionOpen.KEY)
    assert opening.open(payload(spec.Connection.Open("/v"))) == "/v"


def test_the_limits_are_offered(opening: Opening) -> None:
    method = frame.decode_frame(opening.tune())[1].method
    assert (method.channel_max, method.frame_max, method.heartbeat) == (100, 65_536, 60)


def test_without_a_frame_max_a_frame_is_bounded_nevertheless() -> None:
    limits = ConnectionLimits(max_channels=1, frame_max=0, max_message_bytes=1, handshake_timeout=1)
    assert frame.decode_frame(Opening(limits).tune())[1].method.frame_max == 2 << 20


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ((0, 4096, 0), "channel_max = 0 is higher than the maximum allowed"),
        ((101, 4096, 0), "channel_max = 101 is higher than the maximum allowed"),
        ((1, 0, 0), "frame_max = 0 is higher than the maximum allowed"),
        ((1, 65_537, 0), "frame_max = 65537 is higher than the maximum allowed"),
        ((1, 4095, 0), "frame_max = 4095 is lower than the minimum allowed"),
    ],
)
def test_more_than_was_offered_is_not_allowed(opening: Opening, wanted: tuple[int, int, int], words: str) -> None:
    """connection.tune-ok: "the server MUST close the connection without attempting a negotiated close" (530)."""
    with pytest.raises(WireError, match=words) as caught:
        opening.tune_ok(payload(spec.Connection.TuneOk(*wanted)))
    assert caught.value.code == 530


def test_a_vhost_that_is_no_utf_8_is_not_allowed() -> None:
    with pytest.raises(WireError, match="no UTF-8"):
        Opening.open(b"\x00\x0a\x00\x28\x01\xff\x00\x00")


def answers(sent: bytes) -> list[int]:
    """What the server has said, as class << 16 | method."""
    return [key for key, *_ in FrameSplitter(0).feed(sent)[1]]


async def test_a_mechanism_that_was_not_offered_ends_in_silence() -> None:
    """connection.start-ok: "the server MUST close the connection without sending any further data"."""
    said = methods.ConnectionStartOk(client_properties=b"", mechanism=b"EXTERNAL", response=b"", locale=b"en_US")
    sent = await converse([said.frame(0), ENTER], enter=False)
    assert answers(sent) == [methods.ConnectionStart.KEY]


@pytest.mark.parametrize(
    ("octets", "answer"), [(FRAME_MAX - 200, methods.ConnectionTune.KEY), (FRAME_MAX, methods.ConnectionClose.KEY)]
)
async def test_a_login_may_be_as_long_as_a_frame(octets: int, answer: int) -> None:
    """Tokens are longer than frame-min-size."""
    long = replace(AMQPLAIN, response=AMQPLAIN.response + tables.entry(b"x", b"S", bytes(octets)))
    sent = await converse([long.frame(0)], enter=False)
    assert answers(sent) == [methods.ConnectionStart.KEY, answer]


def test_what_a_login_may_hold_is_bounded() -> None:
    """Every socket may hold that much before anybody has logged in."""
    limits = ConnectionLimits(max_channels=1, frame_max=0, max_message_bytes=1, handshake_timeout=1)
    assert (Opening(limits).max_frame, Opening(LIMITS).max_frame) == (131_072, 65_536)
