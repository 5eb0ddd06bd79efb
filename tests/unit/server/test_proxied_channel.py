"""A channel whose client did not select, without a broker behind it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dtx.server.alongside.session import ProxySession
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.frames import BODY, HEADER, FrameSplitter, header_frame
from dtx.wire.amqp09.settings import MAX_BACKLOG
from dtx.xa.xid import Xid
from tests.support.raw import body_frames
from tests.unit.server.test_faults import Socket, running

pytestmark = pytest.mark.usefixtures("one_slice")

PREPARE = methods.DtxPrepare(Xid(1, b"g", b"b"))
ANSWER = methods.DtxPrepareOk(0).frame(1)
DECLARE = methods.QueueDeclare(b"q", arguments=bytes(1000)).frame(1)


def keys_of(data: bytes) -> list[int]:
    return [key for key, _, _, _ in FrameSplitter(0).feed(data)[1]]


class Rig:
    """A session with channel 1, and what it sends to both sides."""

    def __init__(self) -> None:
        self.socket = Socket()
        self.session: ProxySession = running(self.socket)
        self.sent = b""
        """Bytes to the broker."""
        self.answer: Any = None
        """Answers the running call."""
        upstream = self.session.upstream
        upstream.engine.adopt(methods.ConnectionTuneOk(100, 131_072, 0))
        transport: Any = SimpleNamespace(set_write_buffer_limits=lambda **_: None, write=self._write)
        upstream.connection_made(transport)
        self.client(methods.ChannelOpen())
        self.session.channels[1].coordination = SimpleNamespace(run=self._run)  # type: ignore[assignment]

    def _write(self, data: bytes) -> None:
        self.sent += data

    def _run(self, _call: object, _who: object, _frame_max: int, answer: object) -> None:
        self.answer = answer

    def client(self, *said: Method) -> None:
        self.session.client_data(b"".join(method.frame(1) for method in said))

    def broker(self, method: Method) -> None:
        frame = method.frame(1)
        self.session.channels[1].frame(method.KEY, frame, 0, len(frame))


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_frames_behind_a_call_wait_for_its_answer(rig: Rig) -> None:
    rig.client(PREPARE, methods.BasicQos(0, 1))
    rig.client(methods.BasicQos(0, 2))
    assert keys_of(rig.sent) == [methods.ChannelOpen.KEY]
    rig.answer(ANSWER)
    assert keys_of(rig.sent) == [methods.ChannelOpen.KEY, methods.BasicQos.KEY, methods.BasicQos.KEY]
    assert rig.socket.sent == ANSWER


async def test_a_number_is_free_although_an_old_call_runs(rig: Rig) -> None:
    """The broker has closed the channel, so its client waits for no answer."""
    rig.client(methods.BasicQos(0, 1), PREPARE, methods.BasicQos(0, 2))
    rig.broker(methods.ChannelClose(404, b"NOT_FOUND - no queue"))
    rig.sent = b""
    before = rig.session.channels[1]
    rig.client(methods.ChannelCloseOk(), methods.ChannelOpen(), methods.BasicQos(0, 3))
    assert keys_of(rig.sent) == [methods.ChannelCloseOk.KEY, methods.ChannelOpen.KEY, methods.BasicQos.KEY]
    rig.answer(ANSWER)
    assert rig.session.channels[1] is not before
    assert keys_of(rig.socket.sent) == [methods.ChannelClose.KEY]


async def test_a_connection_close_waits_for_frames_behind_a_call(rig: Rig) -> None:
    rig.session._admitted = rig.session.manager.quotas.of("guest", "/")
    rig.client(PREPARE, methods.BasicQos(0, 1))
    rig.sent = b""
    rig.session.client_data(methods.ConnectionClose(200, b"bye").frame(0))
    assert not rig.sent
    rig.answer(ANSWER)
    assert keys_of(rig.sent) == [methods.BasicQos.KEY, methods.ConnectionClose.KEY]


async def test_a_client_is_not_read_from_while_much_waits(rig: Rig) -> None:
    paused: list[bool] = []
    rig.socket.pause_reading = lambda: paused.append(True)  # type: ignore[method-assign]
    rig.socket.resume_reading = lambda: paused.append(False)  # type: ignore[method-assign]
    rig.client(PREPARE)
    rig.session.client_data(DECLARE * (MAX_BACKLOG // len(DECLARE)))
    assert not paused
    rig.session.client_data(DECLARE)
    assert paused[-1]
    rig.answer(ANSWER)
    while rig.session._slices.busy:
        await asyncio.sleep(0)
    assert not paused[-1]


async def test_a_content_is_passed_completely_although_its_channel_closed(rig: Rig) -> None:
    """Its method has been passed: RabbitMQ ends the connection (505) if a close-ok comes before the body."""
    rig.client(methods.BasicPublish(b"", b"q"))
    rig.broker(methods.ChannelClose(404, b"NOT_FOUND - no queue"))
    rig.sent = b""
    frames = header_frame(1, 60, 3, b"\x00\x00"), *body_frames(1, b"abc", 0)
    rig.session.client_data(b"".join((*frames, methods.BasicQos(0, 1).frame(1), methods.ChannelCloseOk().frame(1))))
    assert keys_of(rig.sent) == [HEADER, BODY, methods.ChannelCloseOk.KEY]


async def test_operators_see_where_a_connection_is_in_its_life(rig: Rig) -> None:
    session = rig.session
    rig.client(PREPARE)
    seen = [session.stage]
    session.upstream.connection_lost(None)
    seen.append(session.stage)
    session.stop(methods.ConnectionClose(320, b"dtx stops").frame(0))
    seen.append(session.stage)
    session.client_disconnected()
    seen.append(session.stage)
    assert [stage.value for stage in seen] == ["running", "cut off", "closing", "detached"]
