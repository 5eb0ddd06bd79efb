"""The handshake of standalone mode, without sockets."""

import asyncio
from dataclasses import replace

import pytest
from pika import amqp_object, frame, spec

from dtx.server.limits import ConnectionLimits
from dtx.server.standalone.connection import StandaloneConnection
from dtx.wire.amqp09 import handshake, methods, tables
from dtx.wire.amqp09.frames import FrameSplitter, method_frame
from dtx.wire.amqp09.handshake import Credentials
from tests.evidence.fuzz.server import AMQPLAIN, ENTER, FRAME_MAX, START_OK, Wire, converse, hear, whole

LIMITS = ConnectionLimits(max_channels=100, frame_max=65_536, max_message_bytes=1, handshake_timeout=1)
CAPABLE = {"capabilities": {"authentication_failure_close": True, "consumer_cancel_notify": True}}


def payload(method: amqp_object.Method) -> bytes:
    marshalled: bytes = frame.Method(0, method).marshal()
    return marshalled[7:-1]


def start_ok(properties: object, password: bytes = b"guest") -> bytes:
    return payload(spec.Connection.StartOk(properties, "PLAIN", b"\0guest\0" + password, "en_US"))


async def said(*reads: bytes, limits: ConnectionLimits = LIMITS) -> list[amqp_object.Method]:
    """The methods that a server with these *limits* sends."""
    async with whole() as (parts, _):
        wire = Wire()
        connection = StandaloneConnection(replace(parts, limits=limits), wire)
        await connection.connect()
        await asyncio.sleep(0)
        for data in reads:
            await hear(connection, wire, data)
        connection.client_disconnected()
        await connection.ended
    found, sent = [], bytes(wire.sent)
    while sent:
        consumed, decoded = frame.decode_frame(sent)
        found.append(decoded.method)
        sent = sent[consumed:]
    return found


async def test_the_greeting_lists_the_servers_capabilities() -> None:
    (method,) = await said()
    assert (method.version_major, method.version_minor) == (0, 9)
    assert set(method.mechanisms.split()) == {b"PLAIN", b"AMQPLAIN"}
    assert method.server_properties["product"] == "dtx"
    capabilities = method.server_properties["capabilities"]
    assert all(capabilities.values())
    assert {"dtx", "publisher_confirms", "basic.nack", "consumer_cancel_notify", "per_consumer_qos"} <= set(
        capabilities
    )
    assert "direct_reply_to" in capabilities


def test_start_ok_has_the_user_and_the_clients_capabilities() -> None:
    login = methods.ConnectionStartOk.decode(start_ok(CAPABLE, b"secret"))
    assert handshake.credentials(login.mechanism, login.response) == Credentials(b"guest", b"secret")
    assert handshake.capabilities(login.client_properties) == {
        b"authentication_failure_close",
        b"consumer_cancel_notify",
    }


async def test_a_capable_client_is_notified_of_its_failed_login() -> None:
    *_, close = await said(method_frame(0, start_ok(CAPABLE, b"wrong")))
    assert (close.reply_code, close.reply_text) == (403, "ACCESS_REFUSED - unknown user or wrong password")
    assert (close.class_id, close.method_id) == (10, 11)
    assert len(await said(method_frame(0, start_ok({}, b"wrong")))) == 1, "another client gets no answer"


async def test_each_step_is_expected_once_and_in_its_turn() -> None:
    """A client is authenticated once, and no method is expected during the authentication."""
    tune_ok, enter = spec.Connection.TuneOk(10, 4096, 5), spec.Connection.Open("/")
    for reads in ([tune_ok], [START_OK + START_OK], [START_OK, enter]):
        frames = [data if isinstance(data, bytes) else method_frame(0, payload(data)) for data in reads]
        close = (await said(*frames))[-1]
        assert close.reply_code == 503
        assert "method is not the next step" in close.reply_text
    steps = [method_frame(0, payload(step)) for step in (tune_ok, enter)]
    names = [method.NAME for method in await said(START_OK, *steps)]
    assert names == ["Connection.Start", "Connection.Tune", "Connection.OpenOk"]


async def test_the_limits_are_offered() -> None:
    _, method = await said(START_OK)
    assert (method.channel_max, method.frame_max, method.heartbeat) == (100, 65_536, 60)


async def test_without_a_frame_max_frames_are_limited() -> None:
    limits = ConnectionLimits(max_channels=1, frame_max=0, max_message_bytes=1, handshake_timeout=1)
    _, method = await said(START_OK, limits=limits)
    assert method.frame_max == 2 << 20


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
async def test_more_than_was_offered_is_not_allowed(wanted: tuple[int, int, int], words: str) -> None:
    """connection.tune-ok: "the server MUST close the connection without attempting a negotiated close" (530)."""
    close = (await said(START_OK, method_frame(0, payload(spec.Connection.TuneOk(*wanted)))))[-1]
    assert close.reply_code == 530
    assert words in close.reply_text


async def test_a_vhost_that_is_no_utf_8_is_not_allowed() -> None:
    tune_ok = method_frame(0, payload(spec.Connection.TuneOk(1, 4096, 0)))
    close = (await said(START_OK, tune_ok, method_frame(0, b"\x00\x0a\x00\x28\x01\xff\x00\x00")))[-1]
    assert close.reply_code == 530
    assert "not UTF-8" in close.reply_text


def answers(sent: bytes) -> list[int]:
    """What the server has sent, as class << 16 | method."""
    return [key for key, *_ in FrameSplitter(0).feed(sent)[1]]


async def test_a_mechanism_that_was_not_offered_ends_in_silence() -> None:
    """connection.start-ok: "the server MUST close the connection without sending any further data"."""
    login = methods.ConnectionStartOk(b"", b"EXTERNAL", b"", b"en_US")
    sent = await converse([login.frame(0), ENTER], enter=False)
    assert answers(sent) == [methods.ConnectionStart.KEY]


@pytest.mark.parametrize(
    ("octets", "answer"), [(FRAME_MAX - 200, methods.ConnectionTune.KEY), (FRAME_MAX, methods.ConnectionClose.KEY)]
)
async def test_a_login_may_be_as_long_as_a_frame(octets: int, answer: int) -> None:
    """Tokens can be longer than frame-min-size."""
    long = replace(AMQPLAIN, response=AMQPLAIN.response + tables.entry(b"x", b"S", bytes(octets)))
    sent = await converse([long.frame(0)], enter=False)
    assert answers(sent) == [methods.ConnectionStart.KEY, answer]


@pytest.mark.parametrize(
    ("frame_max", "octets", "answers_with"),
    [
        (0, 130_900, "Connection.Tune"),
        (0, 131_072, "Connection.Close"),
        (65_536, 65_300, "Connection.Tune"),
        (65_536, 65_536, "Connection.Close"),
    ],
)
async def test_memory_of_a_login_is_limited(frame_max: int, octets: int, answers_with: str) -> None:
    """Every socket can hold that much before a login."""
    limits = ConnectionLimits(max_channels=1, frame_max=frame_max, max_message_bytes=1, handshake_timeout=1)
    rest = tables.entry(b"x", b"S", b"")
    response = AMQPLAIN.response + rest[:-4] + octets.to_bytes(4, "big") + bytes(octets)
    login = methods.ConnectionStartOk(b"", b"AMQPLAIN", response, b"en_US").frame(0)
    assert answers_with == (await said(login, limits=limits))[-1].NAME
